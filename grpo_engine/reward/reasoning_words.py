"""The words that the reading of worked solutions knows. English; other languages are read by their signs alone."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARTICLES = _words("the these those this that her his their its all my our another an a")
ABOUT = _words(
    "about approximately approx roughly around nearly almost round rounds rounded rounding nearest estimate estimated"
)
"""The text says that it rounds."""
NO_UNITS = _words(
    "plus minus times multiplied divided of percent squared cubed mod modulo half twice double triple thrice than root "
    "sqrt gcd lcm log ln sin cos tan exp is are was equals equal makes gives"
)
"""They calculate, or compare what stands before them with what follows: never part of a unit."""
PARTIAL = _words(
    "times half twice double triple thrice plus minus less by than per over squared root log ln sin cos tan exp sqrt "
    "quarter third between percent multiplied divided"
)
"""Before the first number of a side: what follows is only a part of what is calculated."""
SHARES = _words(
    "half third thirds quarter quarters fourth fourths fifth fifths sixth eighth tenth tenths root square cube "
    "remainder percent multiple out instead double logarithm factorial average mean power reciprocal opposite "
    "increase decrease raise rise drop reduction discount markup change"
)
"""The same before "of": a third of 12 + 3 is not 12 + 3."""
OPENERS = _words("so thus then therefore hence and that gives get gets have means answer total only")
"""May stand before a number with which an equation begins."""
LEADING = ABOUT | ARTICLES | _words("exactly only just")
"""May stand between the relation and its right side."""
COMPARING = _words("more less fewer greater times out or of")
"""Behind a number: it is not the result but what the result is compared with."""
JOINING = _words("and or then so but")
"""Between a number's unit and an operator they begin something new."""
OTHER_ARITHMETIC = _words(
    "mod modulo modulus binary base hex hexadecimal octal ternary xor remainder rem clock roman concatenate"
)
"""Numbers may not mean what they mean elsewhere."""
