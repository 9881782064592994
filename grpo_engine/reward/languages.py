"""Languages by ISO 639-1 code: their scripts, their function words, and py3langid among those that share a script."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

_SHARED_SCRIPTS = {
    "Latin": "ca cs da de en es et fi fr hr hu id it lt lv nl no pl pt ro sk sl sv tr vi",
    "Cyrillic": "be bg kk ky mk mn ru sr tg uk",
    "Arabic": "ar fa ps ug ur",
    "Devanagari": "hi mr ne sa",
    "Bengali": "as bn",
}
CANDIDATES = {script: codes.split() for script, codes in _SHARED_SCRIPTS.items()}
"""Scripts of several languages -> those that py3langid chooses from, beside the wanted one: fewer err less."""
_OTHER_LATIN = (
    "af az br bs cy eo eu fo fy ga gl gd ha ht ig is jv ku la lb lg ln mg ms mt nn oc om qu rw se sn so sq st sw tk tl "
    "uz vo wa xh yo zu"
)
_ONE_SCRIPT = {
    "am": "Ethiopic", "el": "Greek", "gu": "Gujarati", "he": "Hebrew", "hy": "Armenian", "ka": "Georgian",
    "km": "Khmer", "kn": "Kannada", "lo": "Lao", "ml": "Malayalam", "my": "Burmese", "pa": "Gurmukhi",
    "si": "Sinhala", "ta": "Tamil", "te": "Telugu", "th": "Thai", "zh": "Han", "ba": "Cyrillic", "tt": "Cyrillic",
}  # fmt: skip
SCRIPTS_OF: dict[str, tuple[str, ...]] = {
    **{code: (script,) for script, codes in CANDIDATES.items() for code in codes},
    **dict.fromkeys(_OTHER_LATIN.split(), ("Latin",)),
    **{code: (script,) for code, script in _ONE_SCRIPT.items()},
    "ja": ("Kana", "Han"),
    "ko": ("Hangul", "Han"),
}
"""Language -> its scripts, the most telling first."""

# Small words that running text cannot do without. One that stands in two lists tells nothing and is ignored.
_FUNCTION_WORDS = {
    "en": "the of and is that we to this which are with from by it be have has so then there each for as not if can "
          "since because these those was were what when how you let get your its will would than therefore thus hence "
          "in an at do does both must only two",
    "de": "der die und ist das wir zu dies diese mit von den dem ein eine einen nicht auch für auf sich daher also "
          "dann wenn wird werden sind ich es aus bei nach wie dass oder aber nur noch im zum zur",
    "fr": "le les des et est nous une que qui dans pour avec sur ce cette ces du donc alors pas par plus sont il elle "
          "on au aux si mais ou où ainsi car être avons je",
    "es": "el los las y es que una por con para del se lo como entonces pero más son esta este estos hay al su sus "
          "porque luego así nosotros ser tenemos cada",
    "it": "il gli che è di una per con non sono della del nel questo questa quindi allora anche come più si dalla "
          "perché abbiamo ogni essere lo ma ed",
    "pt": "os uma que não é em para com por do da dos das no na se mais então são este esta isso como também temos "
          "porque cada ou ao",
    "nl": "het een en van dat te dit deze met voor niet zijn op aan ook dan dus als wordt worden er maar bij "
          "naar uit om heeft hebben omdat elke",
}  # fmt: skip
_LEAST_FUNCTION_WORDS = 2
# Of py3langid's probability: what settles that a sentence is, or is not, in the wanted language.
_ENOUGH, _CLEARLY_OTHER = 0.5, 0.8


@cache
def _owners() -> dict[str, str]:
    """Function word -> the one language whose list has it."""
    words = [(word, code) for code, text in _FUNCTION_WORDS.items() for word in text.split()]
    seen: dict[str, set[str]] = {}
    for word, code in words:
        seen.setdefault(word, set()).add(code)
    return {word: next(iter(codes)) for word, codes in seen.items() if len(codes) == 1}


def settled_by_function_words(wanted: str, words: Sequence[str]) -> bool:
    """Whether an eighth of the words, at least two, are function words of the wanted language and none of another."""
    found = list(filter(None, map(_owners().get, words)))
    if len(found) < _LEAST_FUNCTION_WORDS or len(found) < len(words) / 8:
        return False
    return found.count(wanted) == len(found)


def language_of(wanted: str, words: Sequence[str]) -> str:
    """The language of the sentence: `wanted`, another of its script, or "" where py3langid is not sure."""
    text = " ".join(words)
    best, probability = _identifier(wanted).classify(text)
    if best != wanted and probability == _ENOUGH:  # the wanted one may be as probable
        best, probability = wanted, dict(_identifier(wanted).rank(text))[wanted]
    if best == wanted:
        return wanted if probability >= _ENOUGH else ""
    return str(best) if probability >= _CLEARLY_OTHER else ""


@cache
def _model() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def _identifier(wanted: str) -> LanguageIdentifier:
    """py3langid among the languages of the wanted one's script."""
    identifier = copy.copy(_model())
    identifier.set_languages({wanted, *CANDIDATES[SCRIPTS_OF[wanted][0]]})
    return identifier
