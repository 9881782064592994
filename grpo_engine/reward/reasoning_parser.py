"""Tokens to an expression: numbers with units, percentages, mixed numbers, LaTeX fractions and roots, words for
operators ("3 times 4", "20% of 50"). Recursive descent of bounded depth, one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from grpo_engine.reward.reasoning_nodes import Node, ParseError
from grpo_engine.reward.reasoning_tokens import Token
from grpo_engine.reward.reasoning_words import ARTICLES, JOINING, NO_UNITS

_MAX_DEPTH = 40
_MAX_UNIT_WORDS = 8
_SCALES = {"half": Fraction(1, 2), "twice": Fraction(2), "double": Fraction(2), "triple": Fraction(3)}


@dataclass
class Parser:
    """Reads one expression from `tokens[at:]`; afterwards `at` is the first token that does not belong to it."""

    tokens: Sequence[Token]
    at: int = 0
    depth: int = 0
    end: int = 0
    """Index after the last token that means something: units and other words behind it are left out."""
    units: list[str] = field(default_factory=list)
    ambiguous: bool = False
    """It divides by something that people read in two ways: 6 ÷ 2(1 + 2), 10 ÷ 2/3."""

    def expression(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ParseError
        node = self._term()
        while (sign := self._operator("+", "-", "plus", "minus")) is not None:
            node = Node("+" if sign in ("+", "plus") else "-", (node, self._term()))
        self.depth -= 1
        return node

    # ------------------------------------------------------------ looking
    def _peek(self, ahead: int = 0) -> Token | None:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def _is(self, text: str, ahead: int = 0) -> bool:
        token = self._peek(ahead)
        return token is not None and token.text == text and token.kind in ("operator", "word", "comma")

    def _is_number(self, ahead: int = 0) -> bool:
        token = self._peek(ahead)
        return token is not None and token.kind == "number"

    def _operator(self, *texts: str) -> str | None:
        for text in texts:
            if self._is(text):
                self.at += 1
                return text
        return None

    def _expect(self, text: str) -> None:
        if not self._is(text):
            raise ParseError
        self.at += 1

    def _begins(self, ahead: int) -> bool:
        """A number, bracket or fraction stands there."""
        return self._is_number(ahead) or self._is("(", ahead) or self._is("frac", ahead)

    def _tight(self) -> bool:
        """No space between the token before and this one."""
        token = self._peek()
        return self.at > 0 and token is not None and self.tokens[self.at - 1].end == token.start

    # ------------------------------------------------------------ products
    def _term(self) -> Node:
        node = self._factor()
        while (kind := self._product_sign(node)) is not None:
            node = Node(kind, (node, self._factor()))
        return node

    def _product_sign(self, node: Node) -> str | None:
        """Takes what joins the factors read so far with the next one, and says how."""
        if self._multiplies() or self._share(node):
            return "*"
        if self._juxtaposed():
            self.ambiguous |= node.kind == "/"
            return "*"
        if self._operator("//") is not None:
            return "whole"
        if self._operator("/") is not None:
            return "/"
        if self._operator("÷") is not None:
            self.ambiguous |= self._is_number() and self._is("/", 1) and self._is_number(2)
            return "/"
        if self._is("divided") and self._is("by", 1):
            self.at += 2
            return "/"
        if self._is("mod") or self._is("modulo") or (self._is("%") and self._begins(1)):
            self.at += 1
            return "mod"
        return None

    def _multiplies(self) -> bool:
        """Takes a sign or word for multiplication: *, "multiplied by", "times" or "x" before a number."""
        token = self._peek()
        if token is None:
            return False
        if self._is("*"):
            self.at += 1
            return True
        if self._is("multiplied") and self._is("by", 1):
            self.at += 2
            return True
        if self._begins(1) and (self._is("times") or (token.kind == "variable" and token.text in ("x", "X"))):
            self.at += 1
            return True
        return False

    def _share(self, node: Node) -> bool:
        """Takes "of" between a percentage or fraction and a number."""
        if not self._is("of") or node.kind not in ("percent", "/"):
            return False
        ahead = 1
        while (token := self._peek(ahead)) is not None and token.text in ARTICLES:
            ahead += 1
        if not self._is_number(ahead):
            return False
        self.at += ahead
        return True

    def _juxtaposed(self) -> bool:
        """2(3 + 4), (1 + 2)(3 + 4), 2x, 3\\sqrt{4}."""
        token = self._peek()
        if token is None or not self._tight():
            return False
        if token.kind == "variable":
            return self.tokens[self.at - 1].kind == "number" or self.tokens[self.at - 1].text == ")"
        return token.text in ("(", "sqrt") and token.kind == "operator"

    # ------------------------------------------------------------ factors
    def _factor(self) -> Node:
        """A signed operand with its powers, percent sign and units. Leading articles and "twice" are read."""
        if self._operator("-") is not None:
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise ParseError
            node = Node("negative", (self._factor(),))
            self.depth -= 1
            return node
        token = self._peek()
        if self.at and token is not None and token.text in ARTICLES and self._is_number(1):
            self.at += self.tokens[self.at - 1].kind == "operator"
        if token is not None and token.kind == "word" and token.text in _SCALES:
            self.at += 1
            if token.text == "half":
                self._expect("of")
            return Node("*", (Node("number", value=_SCALES[token.text]), self._factor()))
        node = self._postfix(self._operand())
        self.end = self.at
        self._skip_units()
        return node

    def _postfix(self, node: Node) -> Node:
        while (token := self._peek()) is not None:
            if token.kind == "operator" and token.text.startswith("^") and len(token.text) > 1:
                self.at += 1
                node = Node("^", (node, Node("number", value=Fraction(int(token.text[1:][:4])))))
            elif self._operator("^") is not None:
                node = Node("^", (node, self._exponent()))
            elif self._operator("!") is not None:
                node = Node("!", (node,))
            elif self._is("squared") or self._is("cubed"):
                node = Node("^", (node, Node("number", value=Fraction(2 if self._is("squared") else 3))))
                self.at += 1
            elif self._is("percent") or (self._is("%") and not (self._is_number(1) or self._is("(", 1))):
                self.at += 1
                node = Node("percent", (node,))
            else:
                break
        return node

    def _exponent(self) -> Node:
        negative = self._operator("-") is not None
        node = self._operand()
        if self._operator("^") is not None:
            raise ParseError
        return Node("negative", (node,)) if negative else node

    def _operand(self) -> Node:
        token = self._peek()
        if token is None:
            raise ParseError
        self.at += 1
        if token.kind == "number":
            return self._mixed(token)
        if token.kind == "variable":
            return self._variable(token)
        if token.kind == "word" and token.text in ("gcd", "lcm"):
            return self._call(token.text)
        if token.kind != "operator":
            raise ParseError
        match token.text:
            case "(":
                node = self.expression()
                self._expect(")")
                return node
            case "frac" | "binom":
                return Node("/" if token.text == "frac" else "binom", (self._group(), self._group()))
            case "sqrt":
                return Node("sqrt", (self._operand(),))
        raise ParseError

    def _group(self) -> Node:
        """A LaTeX argument in braces."""
        token = self._peek()
        if token is None or token.text != "(":
            raise ParseError
        return self._operand()

    def _variable(self, token: Token) -> Node:
        """f(3) is a function of which nothing is known, x(x + 1) a product."""
        if self._is("(") and self._tight():
            after = self._peek(1)
            if after is not None and after.kind == "number" and self._is(")", 2):
                raise ParseError
        return Node("variable", name=token.text)

    def _call(self, name: str) -> Node:
        self._expect("(")
        first = self.expression()
        self._expect(",")
        node = Node(name, (first, self.expression()))
        self._expect(")")
        return node

    def _mixed(self, token: Token) -> Node:
        """1 1/2, 1½ and 1\\frac{1}{2} are one and a half; "3 4" is no number."""
        assert token.value is not None
        whole = Node("number", value=token.value, decimals=max(0, token.decimals))
        following = self._peek()
        if following is None or token.decimals or token.value.denominator != 1:
            return whole
        if following.kind == "number" and following.decimals == -1:
            self.at += 1
            return Node("number", value=token.value + (following.value or 0))
        bottom = self._peek(2)
        if following.kind == "number" and self._is("/", 1) and bottom is not None and bottom.value:
            top = following.value or Fraction(0)
            if 0 < top < bottom.value and following.end == bottom.start - 1:
                self.at += 3
                return Node("number", value=token.value + top / bottom.value)
        if following.text == "frac" and following.kind == "operator":
            self.at += 1
            return Node("+", (whole, Node("/", (self._group(), self._group()))))
        return whole

    # ------------------------------------------------------------ units
    def _skip_units(self) -> None:
        """Words behind an operand, "/batch", "per batch", "-hour", \\text{ m}: what is counted, not what is done."""
        for _ in range(_MAX_UNIT_WORDS):
            token = self._peek()
            if token is None:
                return
            after = self._peek(1)
            if token.text in JOINING and after is not None and after.kind == "operator":
                return
            if token.kind == "word" and token.text not in NO_UNITS:
                self.units.append(token.text)
                self.at += 1
            elif self._joins_units():
                self.at += 1
            elif self._is("text") and self._is("(", 1):
                self._skip_text()
            else:
                return

    def _joins_units(self) -> bool:
        """ "of" and "/" before a word, a hyphen before a word, "times" before no number."""
        if self._is("times"):
            return not self._begins(1)
        return (self._is("of") or self._is("/") or (self._is("-") and self._tight())) and self._word_follows()

    def _word_follows(self) -> bool:
        token = self._peek(1)
        if token is None or token.kind != "word" or token.text in NO_UNITS:
            return False
        after = self._peek(2)
        return not (token.text in ARTICLES and after is not None and after.kind == "number")

    def _skip_text(self) -> None:
        self.at += 2
        while (token := self._peek()) is not None and token.text != ")":
            if token.kind == "word":
                self.units.append(token.text)
            self.at += 1
        self._expect(")")
