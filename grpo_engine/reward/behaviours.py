"""Behaviours: how often a completion reflects, goes back, checks, looks for other ways, and changes its script.

Counts beside the reward, never in it: they show when such thinking appears during training, as in the "aha moment" of
DeepSeek-AI 2025. A count says how often the phrases stand there, not whether what they announce was done. The phrases
are English first; Chinese, German, French and Spanish have the most common ones.
"""

from __future__ import annotations

from grpo_engine.reward.phrases import Phrases, words_in
from grpo_engine.reward.prose import MAX_CHARACTERS
from grpo_engine.reward.scripts import count_switches

BEHAVIOURS = ("reflection", "backtracking", "verification", "alternatives", "language_switches")
"""The names of the counts, in the order of pages and charts."""

# Written in small letters, with straight apostrophes and single blanks. Matched as whole words; a Chinese phrase
# anywhere. Where phrases of one behaviour overlap, the stretch counts once.
PHRASES: dict[str, tuple[str, ...]] = {
    "reflection": (
        "wait", "hmm", "hold on", "aha", "let me think", "let me reconsider", "let me re-read", "let me reread",
        "thinking about it", "think again", "think about this again", "on second thought", "on reflection",
        "looking back", "come to think of it", "i wonder", "am i sure", "is that right", "is this right",
        "does that make sense", "does this make sense", "that doesn't seem right", "that seems wrong",
        "that seems off", "something is off", "not so fast", "i realize", "i realise",
        "等等", "等一下", "让我想想", "再想想", "仔细想想", "重新考虑",
        "moment mal", "warte", "stimmt das", "attends", "attendez", "réfléchissons", "un momento", "espera",
    ),
    "backtracking": (
        "that's wrong", "that is wrong", "this is wrong", "that's not right", "that is not right", "this is not right",
        "that's incorrect", "that is incorrect", "this is incorrect", "i made a mistake", "i made an error",
        "made a mistake", "my mistake", "scratch that", "strike that", "let me start over", "start over",
        "start again", "starting over", "let me redo", "let me try again", "try again", "let me go back", "go back to",
        "going back to", "let me backtrack", "backtrack", "that doesn't work", "this doesn't work",
        "that does not work", "this does not work", "that won't work", "this won't work", "doesn't lead anywhere",
        "dead end", "let me correct", "correction", "no, that", "actually, no",
        "不对", "错了", "我弄错了", "重新开始", "重新来", "das ist falsch", "von vorn", "c'est faux",
        "je me suis trompé", "recommençons", "eso está mal", "me equivoqué", "empecemos de nuevo",
    ),
    "verification": (
        "let me check", "let's check", "i'll check", "to check", "checking", "double check", "double-check",
        "double checking", "double-checking", "check again", "let me verify", "let's verify", "verify", "verifying",
        "verification", "sanity check", "let me confirm", "let's confirm", "to confirm", "as a check",
        "plug it back", "plugging back", "plug this back", "substituting back", "substitute back", "let me test",
        "let's test", "matches the", "which is correct", "make sure",
        "检查一下", "检查", "验证", "验算", "代入", "核对", "überprüfen", "prüfen wir", "zur probe",
        "vérifions", "vérifier", "comprobemos", "verifiquemos", "comprobar",
    ),
    "alternatives": (
        "alternatively", "another way", "another approach", "another method", "another idea", "another option",
        "a different approach", "a different way", "different method", "other approach", "other way",
        "instead, let", "what if", "we could also", "i could also", "let's consider another", "let me try another",
        "let's try another", "try a different", "maybe instead", "or maybe", "or perhaps", "on the other hand",
        "second approach", "second method", "method 2", "approach 2",
        "另一种", "换一种", "或者", "另外一个方法", "换个思路", "alternativ", "eine andere möglichkeit",
        "anders gesagt", "une autre façon", "une autre méthode", "autrement", "otra forma", "otra manera",
        "de otro modo",
    ),
}  # fmt: skip
_PHRASES = {name: Phrases(phrases) for name, phrases in PHRASES.items()}
_SAME_CHARACTERS = str.maketrans({"’": "'", "\n": " ", "\t": " ", "\r": " "})


def count_behaviours(text: str) -> dict[str, int]:
    """How often each of BEHAVIOURS appears in the first 200,000 characters; every name is there, many with 0."""
    text = text[:MAX_CHARACTERS]
    plain = text.translate(_SAME_CHARACTERS).lower()
    words = set(words_in(plain))
    counts = {name: len(phrases.find(plain, words)) for name, phrases in _PHRASES.items()}
    counts["language_switches"] = count_switches(text)
    return counts
