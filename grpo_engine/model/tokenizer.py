"""The character tokenizer of the tiny models: one token a character, saved as an ordinary fast tokenizer.

56 ids: `<pad> <bos> <eos> <think> </think> <unk>`, the digits, 14 signs and the space, the letters a-z. A character
outside this alphabet (capital letters, line breaks, accents) becomes one `<unk>` token each; decoding shows it as
`<unk>`, never as some other character. Nothing is added around the text: a prompt has as many tokens as characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<think>", "</think>", "<unk>")
ALPHABET = "0123456789" + "+-*/=,;:.()<> " + "abcdefghijklmnopqrstuvwxyz"


def character_tokenizer(max_context_tokens: int = 256) -> PreTrainedTokenizerFast:
    """The tokenizer of `tiny_llama` models.

    Example: character_tokenizer()("7+5=12").input_ids has 6 ids; "<think>" and "</think>" are one id each.
    """
    from transformers import PreTrainedTokenizerFast  # here, so that the preflight can use `characters` without it

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=characters(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=["<think>", "</think>"],
        model_max_length=max_context_tokens,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def characters() -> Tokenizer:
    """The same without what transformers adds around it. Torch-free."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # "[\s\S]" and not ".": the dot leaves line breaks together, which would make two of them one <unk>.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
