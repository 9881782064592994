"""Checks of the tokenizer: end tokens, special tokens, chat template."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerFast

from grpo_engine.self_test.checks import Check

QUESTION = "What is 2 + 2?"
ANSWER = "<think>2 + 2 = 4</think>4"


def check_end_tokens(tokenizer: PreTrainedTokenizerFast, end_token_ids: Collection[int], vocabulary: int) -> Check:
    """The model can sample an end token, and the one that demonstrations end with is among them."""
    eos = tokenizer.eos_token_id
    known = {index: tokenizer.convert_ids_to_tokens(index) for index in sorted(end_token_ids)}
    names = ", ".join(f"{name} ({index})" for index, name in known.items())
    if not known or any(not 0 <= index < vocabulary for index in known):
        return Check(
            "end_tokens", False, f"end tokens {names or 'none'} are not all within the vocabulary of {vocabulary}"
        )
    if eos not in known:
        return Check("end_tokens", False, f"the tokenizer ends texts with id {eos}, which is none of {names}")
    return Check("end_tokens", True, f"a completion ends at {names}")


def check_special_tokens(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> Check:
    """Every special token has an id that the model knows, and is read back from text as that one id."""
    wrong = []
    for token in tokenizer.all_special_tokens:
        index = tokenizer.convert_tokens_to_ids(token)
        ids = tokenizer(str(token), add_special_tokens=False)["input_ids"]
        if not isinstance(index, int) or not 0 <= index < vocabulary or list(ids) != [index]:
            wrong.append(f"{token} (id {index}, read as {list(ids)})")
    if wrong:
        return Check("special_tokens", False, f"not usable: {', '.join(wrong[:5])}; vocabulary {vocabulary}")
    count = len(tokenizer.all_special_tokens)
    return Check("special_tokens", True, f"{count} special tokens, each read back as its own id")


def check_chat_template(tokenizer: PreTrainedTokenizerFast) -> Check | None:
    """A prompt as rendered for sampling is the beginning of the conversation with its answer; None without template.

    Templates that drop or move the reasoning of earlier turns break this: harmless for single turns as trained here,
    not for several turns or for demonstrations rendered whole."""
    if not tokenizer.chat_template:
        return None
    question = [{"role": "user", "content": QUESTION}]
    answer = [{"role": "assistant", "content": ANSWER}]
    try:
        prompt = str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
        whole = str(tokenizer.apply_chat_template(question + answer, tokenize=False))
        longer = str(tokenizer.apply_chat_template(question + answer + question, tokenize=False))
    except Exception as error:  # a template may raise anything, its own raise_exception included
        return Check("chat_template_prefix", False, f"the template refuses a plain conversation: {error}", fatal=False)
    if not whole.startswith(prompt):
        return Check("chat_template_prefix", False, "the rendered answer does not go on from the prompt", fatal=False)
    if not longer.startswith(whole.rstrip()) or ANSWER not in whole:
        detail = "an earlier answer is changed by the next turn; train on single turns only"
        return Check("chat_template_prefix", False, detail, fatal=False)
    return Check("chat_template_prefix", True, "each turn goes on from the text before it", fatal=False)
