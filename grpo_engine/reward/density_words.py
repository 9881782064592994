"""Words and phrases that carry no content of their own: function words and filler, in small letters."""

from __future__ import annotations

_WORDS = """
a an the this that these those some any each every both all such same other another one
i me my we us our ours you your he she it its they them their who whom whose which what where when why how
am is are was were be been being have has had having do does did doing can could shall should will would may might
must let lets get gets got make makes go goes come comes take takes want wants need needs give gives
and or but nor so yet for if then else than as because since while though although until unless whether once
of in on at by to from with without into onto over under about above below between through during before after
against among within upon off out up down again further
not no yes only just also too very really quite rather much many more most few less least even still already now
here there thus hence therefore however moreover furthermore additionally consequently accordingly indeed
okay ok well alright right like basically actually essentially simply clearly obviously certainly definitely
first firstly second secondly third next finally lastly step steps
s t re ve ll d m don doesn didn isn aren wasn won can couldn wouldn shouldn
der die das ein eine einen einem einer und oder aber ist sind war nicht zu von mit für auf im in den dem des wir ich
es sich auch so also dann daher
le la les un une des du de et ou mais est sont nous on il elle ce cette ces que qui ne pas pour dans avec donc alors
el los las unos unas y o pero es son se lo que no por para con como entonces
的 是 了 在 和 与 也 就 都 而 及 我们 这个 那么 所以 因为 因此 一个 可以 这 那 我 们 有 为 对 不 它 他
"""
NO_CONTENT = "\x1f"
"""Stands for a word of a filler phrase."""
EMPTY_WORDS = frozenset([NO_CONTENT, *_WORDS.split()])
"""Function words and words that only lead from one sentence to the next."""

_PHRASES = """
it is important to note that|it is worth noting that|it's worth noting that|it should be noted that|please note that
it is worth mentioning that|as we can see|as you can see|as mentioned before|as mentioned above|as mentioned earlier
as stated before|as stated above|as i said before|as we said before|as previously mentioned|as previously stated
needless to say|it goes without saying|in order to|due to the fact that|for the purpose of|in the process of
at this point in time|at the end of the day|the fact that|in this case|in this problem|in this question|in other words
that is to say|to put it simply|to put it another way|let me think|about this|about it|carefully|for a moment
step by step|let's think|let me start by|let me begin by|let's start by|let's begin by|let me break this down
let me break it down|let's break this down|let's break it down|let me see|let me explain|let us see|i need to|i have to
i will now|i am going to|i'm going to|we need to|we have to|we can now|now we can|now i can|going forward
first and foremost|last but not least|all in all|in conclusion|to conclude|to summarize|in summary|to sum up|to recap
overall|the next step is to|the first step is to|i think that|i believe that|it seems that|it appears that
it is clear that|it is obvious that|it is easy to see that|we know that|we can say that|we can conclude that
this means that|what this means is that|which means that|the answer to this problem is|the answer to this question is
the answer to the problem is|the answer to the question is|i hope this helps|feel free to ask|sure, here is|of course
great question|let me double-check|let me double check|let me check|just to be sure|just to be safe|just to be clear
once again|in a sense|kind of|sort of|so basically|so essentially|so now|okay, so|okay so|alright, so|well, so
"""
FILLERS = tuple(_PHRASES.strip().replace("\n", "|").split("|"))
"""Filler phrases in small letters."""
