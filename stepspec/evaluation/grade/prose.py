r"""What the words around an answer say: they deny it, change it, take it back, or name another one."""

import re
from fractions import Fraction

from stepspec.evaluation.grade.latex import cleaned
from stepspec.evaluation.grade.number import (
    AMOUNT,
    CHANGES,
    PARTS,
    SCALE,
    SHORT,
    UNSIGNED,
    Number,
    in_digits,
    read_number,
)


def _any(words: str) -> str:
    """Return a pattern for one of the words; `_` stands for a space."""
    return rf"(?:{'|'.join(words.split())})".replace("_", " ")


_MARKUP = re.compile(
    r"\\?\$|\\[()\[\],;:! ]|\\q?quad(?![a-z])|\*\*|__|`|[*{}](?=\s|$)|(?<=\s)\*|\\(?:text|textbf|mathrm|mbox|left|right)(?![a-z])|[{}]"
)
DENIES = re.compile(
    rf"\b{_any('not never neither nor cannot nobody no_longer wrong incorrect false different_from anything_but far_from')}\b|n't\b", re.I
)
_VERB = _any("is are was were equals gives makes get leaves but so then and_so")
_NEGATION = _any(
    "not never neither nor cannot no_longer instead_of rather_than other_than except unlike anything_but less_than more_than "
    "fewer_than greater_than"
)
_PART = _any("half twice thrice double triple minus negative") + rf"|{_any('half third quarter multiple factor square cube root power opposite negation reciprocal inverse')}s? of"
_SUBJECT = r"(?:the |my |our )?(?:final |correct )?(?:answer|it|this|that|value)"
_DENIED = re.compile(
    rf"(?:\b{_NEGATION}|n't)\b(?: (?!{_VERB}\b)[\w']+){{0,3}}[ (:]*$"
    rf"|\b(?:{_PART})(?: of)?[ (]*$|\b(?:{_PART}) (?:of )?{_SUBJECT} (?:is|equals)[ (:]*$"
    rf"|(?<!only )\b(?:if|suppose|assume|assuming|unless|whether) (?!and only)(?:(?!\bthen\b|\banswer\b|[,.;:] ).){{0,40}}(?:\b(?:is|are|was|were|be|equals)|=)[ (]*$"
    r"|\b(?:do|does|did|would|can)(?:n't| not) (?:think|believe|say|know)\b[^.;]{0,60}$|\bdoubt\b[^.;]{0,60}$",
    re.I,
)
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?)"
_ONE_MORE = rf"(?:and|plus) (?:a|one|two|three) {_any(PARTS)}\b"
_UNITS = _any("feet foot ft hours? hrs? pounds? lbs? minutes? mins? dollars? yards? meters? m km kg days? weeks? years?")
_SMALL = _any("inch inches in minutes? mins? seconds? secs? ounces? oz cents? feet cm m g hours? days? months?")
_CHANGED = re.compile(
    rf" ?(?:per ?cent|\\?%) ?of\b|,\d{{3}}(?!\d)|, ?-?\d[\d.]* ?(?:[,.)]|$)|(?-i: ?[kKMB]\b)(?=$| )|\.\d| ?(?:{SCALE}|{_any(PARTS)})\b"
    rf"| (?:squared|cubed|factorial|mod|over|plus|times (?:as|the|that|\d)|{_ONE_MORE}|or (?:so|more|less|fewer)\b(?! than))\b"
    rf"|,? ?\(?(?:is|was|are)? ?(?:wrong|incorrect|false|mistaken|not (?:the )?(?:right|correct|final|true|answer|it)|n't (?:the )?(?:right|correct|true))\b(?! if)"
    rf"|,? (?:isn|wasn)'t (?:the )?(?:right|correct|true|answer)| ?\?"
    rf"| (?:if|for|when) [^.\n]{{0,60}}?(?:,|;|\band\b|\bor\b|\bbut\b) ?-?\d+ ?(?:if|for|when|otherwise)\b"
    rf"| {_UNITS},? (?:and )?\d+ {_SMALL}\b",
    re.I,
)
_ANOTHER = re.compile(rf"(?: [a-z]+)?,? ?\(?(?:(?:or|to|through) (?:(?:possibly|maybe|perhaps|even) )?|[–—-] ?){_NUMBER}(?![\w.,/^*+-]*[\w/^*])", re.I)
_REGRET = _any("no wait actually oops sorry hmm+ correction hold_on nope but oh")
_WRONG = r"(?:\w+ly |quite )?(?:wrong|incorrect|false|mistaken|a mistake|an error|not (?:quite )?(?:right|correct|true|it\b|the (?:\w+ )?answer))(?! (?:if|when|unless|only)\b)"
_START = r"(?:^|[.!?…\n])\W*"
_IT = r"(?:which|that|this|it|(?:the|my|this|that) (?:answer|result|value))"
_TAKEN_BACK = re.compile(
    rf"(?:{_START}|\b(?:but|which|and|so) )(?:{_REGRET}\W+)*(?:{_IT} ?(?:is|was|seems|must be|'s) {_WRONG}|(?:is|was) {_WRONG}"
    rf"|{_IT} ?(?:(?:isn|wasn|can)'t (?:be )?|can ?not be )(?:right|correct|true|it)\b)"
    rf"|{_START}(?:{_REGRET}\W+)+(?:that|this|it)? ?(?:is|was|'s)? ?(?:wrong|incorrect|not right)\b"
    r"|\bI (?:have |'ve )?(?:made (?:a|an) (?:\w+ )?(?:mistake|error|slip)|was wrong|am wrong|misread|miscounted|miscalculated|take (?:it|that) back)"
    r"|\b(?:scratch|strike|forget|ignore) that\b|\bnever ?mind\b|\bmy (?:mistake|bad|error)\b",
    re.I,
)
_SHOULD_BE = r"(?:it|that|this|the answer) ?(?:should be|must be|is|'s) ?(?:really |actually |rather )?"
_INSTEAD = re.compile(
    rf"(?:{_START}|[,;] ?| )(?<![\w'])(?:no|wait|actually|oops|correction)\b\W*?(?:{_REGRET}\W+)*(?:{_SHOULD_BE})?{_NUMBER}(?! ?[-+*/=×])"
    rf"|{_START}(?:it|that|the answer) should be {_NUMBER}",
    re.I,
)
_REGRETS = re.compile(rf"{_START}(?:wait|hmm+|oops|sorry|correction|hold on|on second thought|I (?:forgot|missed|overlooked))\b", re.I)
_COMES_TO = re.compile(rf"(?:\bis|\bbe|\bequals|=|\bget|\bgives|\bto) ?{_NUMBER}", re.I)
_STATES = re.compile(rf"\banswer (?:is|should be|must be)[ :]*{_NUMBER}", re.I)


def plain(text: str) -> str:
    """Return a text without markup, with single spaces in its lines."""
    return re.sub(r"[^\S\n]+", " ", _MARKUP.sub("", text.replace("’", "'")))


def is_denied(before: str) -> bool:
    """Return whether the clause that ends in an answer denies it or does something to it."""
    return bool(_DENIED.search(re.split(r"[.!?;] |\n\s*\n|, ", plain(before).rstrip())[-1].replace("\n", " ")))


def is_changed(behind: str, answer: str) -> bool:
    """Return whether the words directly behind an answer deny it, change it, or add another one."""
    behind = plain(behind.partition("\n")[0])
    if _CHANGED.match(behind):
        return True
    other = _ANOTHER.match(behind)
    return other is not None and not _is_same(answer, other[1])


def is_taken_back(behind: str, answer: str) -> bool:
    """Return whether a text says later that an answer is wrong, or states another number."""
    behind = plain(behind)
    if _TAKEN_BACK.search(behind):
        return True
    others = [match[1] or match[2] for match in _INSTEAD.finditer(behind)]
    regret = _REGRETS.search(behind)
    others += [match[1] for match in _COMES_TO.finditer(behind[regret.end() :])][-1:] if regret else []
    if _number_in(answer):
        others += [match[1] for match in _STATES.finditer(behind) if not is_denied(behind[: match.start()])][-1:]
    return any(not _is_same(answer, other) for other in others)


def _number_in(answer: str) -> Number | None:
    clean = cleaned(answer[:100])
    return read_number(clean) or named_number(clean)


def _is_same(answer: str, other: str) -> bool:
    first, second = _number_in(answer), read_number(cleaned(other))
    return first is not None and second is not None and first.equals(second)


_IN_SENTENCE = re.compile(
    rf"(?<![\w.\\^_/+*)\]])-?(?<![\w)\]]-)(?:\d+ \d+/\d+|{UNSIGNED}(?:/\d+)?)(?: {SCALE}\b)?(?: ?%)?", re.I
)
_CHANGED_BEFORE = re.compile(
    rf"\b(?:{_any('half twice thrice double triple minus negative plus times or nor out_of divided_by multiplied_by base mod modulo page option nearly almost between either instead_of step equation case problem to at_least at_most')}"
    rf"|{_any('third quarter multiple factor square cube root power reciprocal opposite inverse')}s? of|{_any('less more fewer greater other rather higher lower')} than)\W*(?:of )?$"
    r"|[-+*/^<>_\\]\s*$|\w\($|\\(?:[lgn]?eq|approx)\s*$|[(\[][^()\[\]]*,\s*$",
    re.I,
)
_GO_ON = "|".join(sorted(CHANGES - frozenset("and to but less more fewer short below above under over".split())))
_CHANGED_BEHIND = re.compile(
    rf"\s*(?:(?:{_GO_ON})\b|(?:[a-z]+ ){{0,3}}{AMOUNT}\b|(?:and|but) (?:a|an|some|not)\b|(?:to|through|over) \d|out of\b|[-+*/<>=!_]|\^(?!\s*\\circ)"
    r"|\\(?!circ)|[a-zA-Z](?![a-zA-Z'. ])|\()",
    re.I,
)
_IS = re.compile(r"\b(?:is|are|was|were|be|equals)\b\W*", re.I)
_CONDITION = re.compile(r"\W*(?:if|suppose|assume|assuming|unless|whether|let)\b", re.I)
_OF_IT = re.compile(rf"\b(?:{_PART}) {_SUBJECT}\b", re.I)
_UNSOLVED = re.compile(
    r"(?:\d\s*[a-zA-Z]|[a-zA-Z]\s*\^\s*\d|(?:^|\s)-\s*[a-zA-Z])\s*$|\b(?:half|twice|double|triple|minus)\b|=[^=]*(?:[,;]|\band\b|\bor\b)"
)


def named_number(clean: str) -> Number | None:
    """Return the number that a sentence names as its answer; None if it names none or several, or changes it."""
    text = " ".join(plain(in_digits(clean)).split())
    text = re.sub(r",? \(?(?:and )?not -?\d[\d.,]*\)?|(?<=\d) \([a-z-]+\)", "", text)
    if text.endswith("?") or DENIES.search(text) or _CONDITION.match(text) or _OF_IT.search(text):
        return None
    before, _, behind = text.rpartition("=")
    if before:
        if _UNSOLVED.search(before) or not _IN_SENTENCE.match(behind.strip()):
            return None
        text = behind
    if len(_values(text)) > 1 and (verbs := list(_IS.finditer(text))) and re.search(r"\d", text[: verbs[-1].start()]):
        text = text[verbs[-1].end() :]  # "half of 24 is 12"
    if len(_values(text)) != 1:
        return None
    last = list(_IN_SENTENCE.finditer(text))[-1]
    left, right = text[: last.start()], text[last.end() :]
    word = re.match(r" ?([a-zA-Z]+)", right)
    if word and word[1] not in SHORT and (word[0][0] != " " or not re.search("[aeiouAEIOU]", word[1])):
        return None  # a product of unknowns
    if _CHANGED_BEFORE.search(left) or _CHANGED_BEHIND.match(right):
        return None
    if re.match(r" (?:less|more|fewer)\b", right) and (not left.strip() or re.search(r"\b(?:is|are|was|be)\W*$", left)):
        return None
    return read_number(cleaned(last[0]))


def _values(text: str) -> set[Fraction | None]:
    numbers = [read_number(cleaned(each[0])) for each in _IN_SENTENCE.finditer(text)]
    return {number and number.value for number in numbers}


_SENTENCE = re.compile(r"(?<!\b[A-Za-z])[.!?](?=[\s\"')\]}]|$)|\n")
_CLAUSE = re.compile(r"[,;:] |\b(?:so|thus|hence|therefore|then)\b,? |\band (?=[a-z]+ )", re.I)


def last_number(text: str) -> tuple[str, str] | None:
    """Return the number that the last sentence of a text with a number comes to, and what stands behind that sentence."""
    tail = plain(text[-2_000:])
    for start in reversed([0, *(end.end() for end in _SENTENCE.finditer(tail))]):
        end = _SENTENCE.search(tail, start)
        sentence = tail[start : end.end() if end else len(tail)]
        if re.search(r"\d", sentence):
            number = _last_in(sentence)
            return (number, tail[start + len(sentence) :]) if number else None
    return None


def _last_in(sentence: str) -> str | None:
    if _CONDITION.match(sentence) or sentence.rstrip().endswith("?"):
        return None
    starts = [0, *(end.end() for end in _CLAUSE.finditer(sentence))]
    start = next(start for start in reversed(starts) if re.search(r"\d", sentence[start:]))
    clause, before = sentence[start:].strip("> \n"), sentence[:start]
    if re.match(r"\W*(?:(?:and|or) )?-?\d", clause) and re.search(r"\d\W*$", before):
        return None  # the last of a list
    if re.match(r"\W*[a-zA-Z] ?=", clause) and re.search(r"[a-zA-Z] ?= ?-?[\d.]+\W*$", before):
        return None  # two unknowns
    if named_number(cleaned(clause)) is None:
        return None
    return list(_IN_SENTENCE.finditer(" ".join(plain(in_digits(cleaned(clause))).split())))[-1][0]
