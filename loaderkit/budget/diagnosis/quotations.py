"""Set apart the errors that a sentence quotes, as if they were pasted.

"When I train I get this error `RuntimeError: ... 12.5 GiB`, how can I solve it?" has an
error of a program inside a person's sentence: the sentence's clauses and questions say
nothing of the error.  So a quotation that is announced as what came up, and has the
class of an error or figures of its own, becomes a paragraph.  Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.lexicon import compile_words

if TYPE_CHECKING:
    from collections.abc import Iterator

_QUOTATION = re.compile(
    r"(?:(?<=[\s(:,_*])|^)(?:"
    r"(?<!`)`(?P<ticks>[^`]{12,700})`(?!`)"
    r"|\"(?P<marks>[^\n]{12,700}?)\"(?=[\s.,;:!?)*_]|\Z)"
    r"|\u201c(?P<curly>[^\u201d]{12,700})\u201d)"
    r"|(?<=[a-z] )(?P<bare>(?:\w{1,30}\.){0,6}\w{0,40}(?:[Ee]rror|Exception): "
    r"[^\n]{12,700})(?=\n|\Z)",
    re.MULTILINE,
)
_LEFT_OUT = '"..."'
_COMMENT = re.compile(r"[^\S\n]*(?://|/?\*|#|--|;|\w{1,20} ?[=(])")
"""A line of a program."""
_CLAUSE = 160
"""Characters before a quotation in which the clause that announces it begins."""
_CLAUSE_START = re.compile(r"[.!?:]\s|[,;\n]|\b(?:but|and|then|so)\b", re.IGNORECASE)
_ANNOUNCES = compile_words(
    r"\b(?:get|gets|got|getting|receive|receives|received|receiving"
    r"|encounter(?:s|ed|ing)?|hits?|hitting|fac(?:e|es|ed|ing)|met|meet|saw|seeing"
    r"|(?:ran|run|running) into|throws|threw|rais(?:es|ed)|gives|gave|giving"
    r"|shows|showed|showing|says|said|saying|reports|reported|return(?:s|ed)"
    r"|prints|printed|complain(?:s|ed|ing)|report(?:s|ed) by"
    r"|(?:fail|crash|die|exit|abort|end|stop|break)(?:s|es|ed|d|ing)?"
    r"(?: out)?(?: with| on| due to [\w ]{1,30})?"
    r"|(?:this|the|following|an?) (?:[\w-]{1,20} ){0,3}(?:error|exception|message)s?"
    r"(?: (?:message|below|is|was|occurs|occurred|appears|appeared"
    r"|came up|comes up))?)"
    r"(?: [\w'-]{1,20}){0,8}[: ,_*]{0,4}\Z"
)
"""It came up, and the writer, a program or a job met it."""
_IS_NO_EVENT = compile_words(
    r"\b(?:if|unless|until|whenever|may|might|could|would|should|will|can(?:not)?"
    r"|n['\u2019]t|not|never|no longer|without|avoid\w{0,3}|prevent\w{0,3}|instead"
    r"|you|your|users?|people|developers|engineers|customers|someone|anyone"
    r"|many|most|some|often|frequently|commonly|frustrating|dreaded"
    r"|sometimes(?! (?:it|I|we|the|my|this)\b)|usually|typically"
    r"|(?<!\bI\s)(?<!\bwe\s)(?<!\bit\s)always"
    r"|to (?:see|get|hit|say)"
    r"|expect\w{0,3}|used to|handl\w{1,3}|catch\w{0,3}|caught|test\w{0,3}"
    r"|check\w{0,3}|look\w{0,3}|search\w{0,3}|grep\w{0,4}|docs?|documentation"
    r"|manual|guide|fix\w{0,3}|examples?|such as|like|titled|called|named|reads?"
    r"|change[sd]?|replace[sd]?|support|means|friendlier|better|improve\w{0,2}"
    r"|no|why|what|how)\b"
)
"""A clause that tells of what may come, of what others meet, or of the error's text."""
_IS_A_PERSONS = compile_words(r"\b(?:I|we|my|our|me|us|it|this|the)\b")
"""A clause of a person's, before an error without marks around it."""
_IS_HEDGED = compile_words(
    r"\b(?:you|users?|people|anyone|someone) (?:(?:who|that|may|might|can|could|often"
    r"|sometimes|usually|still|ever) ){0,3}(?:gets?|sees?|encounters?|hits?|faces?"
    r"|receives?|runs? into)\b"
    r"|\b(?:may|might|can|could|should|should not|must not) (?:still |then |also )?"
    r"(?:get|see|raise|throw|fail|give|cause|lead|result|end|crash|encounter)\b"
    r"|\A\W{0,4}to (?:avoid|prevent|fix|handle|catch|test)\b"
    r"|\b(?:avoids?|prevents?|handles?|catch(?:es)?|expects?|no longer|used to"
    r"|(?:docs?|documentation|manual) says?)\b"
)
"""A clause that tells what may come, before an error without marks around it."""
_IS_SPOKEN_OF = compile_words(
    r"\A\W{0,4}(?:instead of|rather than|in place of|unlike|handles?|catch(?:es)?)\b"
    r"|\b(?:improves?|changes?|replaces?|rewords?|rephrases?|shortens?|translates?) "
    r"(?:the |this |our )?(?:[\w-]{1,20} ){0,2}(?:message|text|wording|hint)\b"
    r"|\b(?:(?:should|must|does|do|will|would|did) (?:not|no longer)"
    r"|(?:should|does|do|wo|would|did)n['\u2019]t)"
    r" (?:[\w-]{1,20} ){0,2}"
    r"(?:fail|crash|die|end|abort|raise|throw|get|give|show|say)\b"
)
"""A clause that only speaks of the error's text, or says that it does not come."""
_TOLD_BEHIND = compile_words(
    r"[^\S\n]*(?:\w{1,12} ){0,2}(?:means?|indicates?|should|will|would|can|could"
    r"|may|might|is (?:raised|thrown|expected|shown|printed|logged|returned|a|an|the"
    r"|not)|are|or|and [\"`]|as|was (?:fixed|caused)|error[s]? (?:is|are|was|means?))\b"
)
_OWN_CLASS = re.compile(
    r"[^\n]{0,80}?(?:\w{0,60}(?:Error|Exception)|\b(?i:error|fatal|panic))\b"
    r"[^\n:]{0,80}: ?\S"
)
_OWN_FIGURES = re.compile(
    r"(?<![\w.])\d[\d.,]{0,20} ?(?:[KMGT]i?[Bb]\b|bytes?\b)|(?<![\w.,])\d{5,}(?![\w-])"
)
_OWN_SENTENCE = re.compile(r"\s*[A-Z][\w'-]{0,20}(?: [\w'(),-]{1,30}){4,40}[.!]?\s*")
_PLACEHOLDER = re.compile(
    r"\b[XN]{1,}(?:\.X+)? ?(?:[KMGT]i?B|bytes)\b|<\w{1,20}>|\{\w{0,20}\}|%[dsf]|\.\.\."
)


def set_quotations_apart(text: str) -> str:
    r"""Make a paragraph of each error that a sentence quotes as what came up.

    Args:
        text: A text without the breaks and prefixes of a log.

    Returns:
        The text, with what is quoted of errors between blank lines.

    >>> set_quotations_apart("I get this error `Error: out of 3 GB memory` here, why?")
    'I get this error:\n\nError: out of 3 GB memory\n\n here, why?'
    >>> set_quotations_apart("You may get `Error: out of 3 GB memory` here.")
    'You may get `Error: out of 3 GB memory` here.'
    """
    pieces = []
    done = 0
    for start, end, quoted in _errors_quoted(text):
        if quoted:
            announced = text[done:start].rstrip(" :_*")
            pieces += [announced, ":\n\n", quoted.strip(), "\n\n"]
        else:
            pieces += [text[done:start], _LEFT_OUT]
        done = end
    if not pieces:
        return text
    return "".join([*pieces, text[done:]])


def _errors_quoted(text: str) -> Iterator[tuple[int, int, str]]:
    for match in _QUOTATION.finditer(text):
        quoted = match.group(match.lastgroup or 0)
        if not (
            _OWN_CLASS.match(quoted)
            or _OWN_FIGURES.search(quoted)
            or _OWN_SENTENCE.fullmatch(quoted)
        ):
            continue
        if "\n\n" in quoted or _PLACEHOLDER.search(quoted):
            continue
        line_start = (
            text.rfind("\n", max(0, match.start() - _CLAUSE), match.start()) + 1
        )
        if _COMMENT.match(text, line_start):
            continue
        clause = _clause_before(text, match.start())
        is_bare = match.lastgroup == "bare"
        if (_IS_HEDGED if is_bare else _IS_SPOKEN_OF).search(clause):
            yield match.start(), match.end(), ""
        elif is_bare and _IS_A_PERSONS.search(clause) is None:
            pass  # programs put the errors of others into their lines
        elif _IS_NO_EVENT.search(clause) or _ANNOUNCES.search(clause) is None:
            continue
        elif _TOLD_BEHIND.match(text, match.end(), match.end() + _CLAUSE) is None:
            yield match.start(), match.end(), quoted


def _clause_before(text: str, position: int) -> str:
    """Give the last clause before a quotation."""
    before = text[max(0, position - _CLAUSE) : position]
    clause = before
    for start in _CLAUSE_START.finditer(before):
        rest = before[start.end() :]
        if rest.strip(" :_*") == "":
            break
        clause = rest
    return clause
