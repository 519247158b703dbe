r"""What the words around an answer say: they deny it, change it, take it back, or name another one."""

import re
from fractions import Fraction
from functools import partial

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

_pattern = partial(re.compile, flags=re.IGNORECASE)


def _any(words: str) -> str:
    """Return a pattern for one of the words; `_` stands for a space."""
    return rf"(?:{'|'.join(words.split())})".replace("_", " ")


_MARKUP = re.compile(
    r"\\?\$|\\[()\[\],;:! ]|\\q?quad(?![a-z])|\*\*|__|`|[*{}](?=\s|$)|(?<=\s)\*|[{}]"
    r"|\\(?:text|textbf|mathrm|mbox|left|right)(?![a-z])"
)


def plain(text: str) -> str:
    """Return a text without markup, with single spaces in its lines."""
    return re.sub(r"[^\S\n]+", " ", _MARKUP.sub("", text.replace("’", "'")))


_WRONG = r"(?:\w+ly |quite )?(?:wrong|incorrect|false|mistaken|a mistake|an error|not (?:quite )?(?:right|correct|true|it\b))"
_NOT_THE = rf"(?:{_WRONG}|not (?:the )?(?:\w+ )?answer)(?! (?:if|when|unless|only)\b)"
_NOT = _any("not never neither nor cannot no_longer instead_of rather_than except unlike anything_but")
_VERB = _any("is are was were equals gives makes get leaves but so then")
_PART = _any(
    "half twice thrice double triple minus negative (?:third|quarter|multiple|factor|square|cube|root|power|opposite|reciprocal)s?_of"
)
_IT = r"(?:the |my |our )?(?:final |correct )?(?:answer|it|this|that|value)"
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?)"
_UNIT = _any("feet foot ft hours? hrs? pounds? lbs? minutes? mins? dollars? yards? meters? m km kg days? weeks? years?")
_REGRET = _any("no wait actually oops sorry hmm+ correction hold_on nope but oh")
_START = r"(?:^|[.!?…\n])\W*"
DENIES = _pattern(rf"\b(?:{_NOT}|nobody|wrong|incorrect|false|different from|far from)\b|n't\b")
_DENIED = _pattern(
    rf"(?:\b(?:{_NOT}|(?:less|more|other) than|wrong|incorrect|nobody)|n't)\b(?: (?!{_VERB}\b)[\w']+){{0,3}}[ (:]*$"
    rf"|\b(?:{_PART})(?: of)?(?: {_IT} (?:is|equals))?[ (:]*$"
    r"|(?<!only )\b(?:if|suppose|assum\w+|unless|whether) (?!and only)(?:(?!\bthen\b|\banswer\b).)*(?: is| are| was| were| be|=)[ (]*$"
    rf"|(?<![\w.,/^*+-])-?\d[\d,.]* ?,? ?(?:(?:or|to|through) |[–—-] ?)\(?$|\d[.,:]$|\d ?{_UNIT} (?:and )?\(?$"
    r"|(?:^|\bare|\bis|[:=,]) ?\(?-?\d[\d.]* ?, ?\(?$"
)
_CHANGED = _pattern(
    rf" ?(?:per ?cent|\\?%) ?of\b|,\d{{3}}(?!\d)|, ?-?\d[\d.]* ?(?:[,.)]|$)|(?-i: ?[kKMB])\b(?=$| )|\.\d| ?\?| {_UNIT},? (?:and )?\d"
    rf"| ?(?:{SCALE}|{PARTS})\b| (?:squared|cubed|factorial|mod|over|plus|times (?:as|the|that|\d)|or (?:so|more|less|fewer)\b(?! than))\b"
    rf"| (?:and|plus) \w+ {PARTS}\b|,? ?\(?(?:(?:is|was|are) )?{_NOT_THE}|,? (?:isn|wasn)'t (?:the )?(?:right|correct|true|answer)"
    r"| (?:if|for|when) [^.\n]*?(?:,|;|\band\b|\bor\b|\bbut\b) ?-?\d+ ?(?:if|for|when|otherwise)\b"
)
_ANOTHER = _pattern(
    rf"(?: [a-z]+)?,? ?\(?(?:(?:or|to|through) (?:\w+ly |maybe |perhaps |even )?|[–—-] ?){_NUMBER}(?![\w.,/^*+-]*[\w/^*])"
)
_TAKEN_BACK = _pattern(
    rf"(?:{_START}(?:{_REGRET}\W+)*|\b(?:but|which|and|so) )(?:(?:which|that|this|it|(?:the|my|this|that) (?:answer|result|value)) ?)?"
    rf"(?:(?:is|was|seems|must be|'s) {_NOT_THE}|(?:(?:isn|wasn|can)'t|can ?not) (?:be )?(?:right|correct|true|it)\b)"
    rf"|{_START}(?:{_REGRET}\W+)+(?:that|this|it)? ?(?:wrong|incorrect|not right)\b"
    r"|\bI (?:have |'ve )?(?:made an? (?:\w+ )?(?:mistake|error|slip)|[wa]\w+ wrong|mis(?:read|counted|calculated)|take (?:it|that) back)"
    r"|\b(?:scratch|strike|forget|ignore) that\b|\bnever ?mind\b|\bmy (?:mistake|bad|error)\b"
)
_REGRETS = _pattern(
    rf"(?:{_START}|[,;] ?)(?:no(?=[,.!…—]| wait)|wait|actually|hmm+|oops|sorry|correction|hold on|on second thought"
    r"|I (?:forgot|missed|overlooked)|(?:(?:so|then) )?(?:the answer (?:is|should be|must be)|it should be))\b"
)
_COMES_TO = _pattern(
    rf"(?:\b(?:is|be|equals|get|gives|to|no|wait|actually|oops|correction)|=)\W{{0,5}}?{_NUMBER}(?! ?[-+*/=×])"
)


def is_denied(before: str) -> bool:
    """Return whether the clause that ends in an answer denies it or does something to it."""
    clause = re.split(r"(?:[.!?;] |\n\s*\n|, )(?!\s*$)", plain(before))[-1]
    return bool(_DENIED.search(" ".join(clause.split("\n"))))


def is_condition(before: str) -> bool:
    """Return whether the sentence that is written up to an answer begins with a condition."""
    return _CONDITION.match(re.split(r"[.!?]\s|\n", plain(before).rstrip())[-1]) is not None


def is_changed(behind: str, answer: str) -> bool:
    """Return whether the words directly behind an answer deny it, change it, or add another one."""
    behind = plain(behind.partition("\n")[0])
    other = _ANOTHER.match(behind)
    return bool(_CHANGED.match(behind)) or (other is not None and not _is_same(answer, other[1]))


def is_taken_back(behind: str, answer: str) -> bool:
    """Return whether a text says later that an answer is wrong, or states another number."""
    behind = plain(behind)
    others = list[str]()
    if (regret := _REGRETS.search(behind)) and number_in(cleaned(answer[:100])):
        others = [match[1] for match in _COMES_TO.finditer(behind, regret.start())][-1:]
    return bool(_TAKEN_BACK.search(behind)) or any(not _is_same(answer, other) for other in others)


def number_in(clean: str) -> Number | None:
    """Return the number that a cleaned answer is or, as a sentence, names."""
    return read_number(clean) or named_number(clean)


def _is_same(answer: str, other: str) -> bool:
    first, second = number_in(cleaned(answer[:100])), read_number(cleaned(other))
    return first is not None and second is not None and first.equals(second)


_IN_SENTENCE = _pattern(
    rf"(?<![\w.\\^_/+*)\]])-?(?<![\w)\]]-)(?:\d+ \d+/\d+|{UNSIGNED}(?:/\d+)?)(?: {SCALE}\b)?(?: ?%)?"
)
_BEFORE_CHANGES = _any(
    "times nor or out_of (?:divided|divisible|multiplied)_by base modulo? page option nearly almost between either plus to "
    "instead_of step equation case problem at_(?:least|most) (?:less|more|fewer|greater|other|rather|higher|lower)_than"
)
_CHANGED_BEFORE = _pattern(
    rf"\b(?:{_PART}|{_BEFORE_CHANGES})\W*(?:of )?$|[-+*/^<>_\\]\s*$|\w\($|\\(?:[lgn]?eq|approx)\s*$|[(\[][^()\[\]]*,\s*$"
)
_GO_ON = "|".join(sorted(CHANGES - frozenset("and to but less more fewer short below above under over".split())))
_CHANGED_BEHIND = _pattern(
    rf"\s*(?:(?:{_GO_ON})\b|(?:[a-z]+ ){{0,3}}{AMOUNT}\b|(?:and|but) (?:an?|some|not)\b|(?:to|through|over) \d|out of\b"
    r"|[-+*/<>=!_(]|\^(?!\s*\\circ)|\\(?!circ)|[a-z](?![a-z'. ]))"
)
_CONDITION = _pattern(r"\W*(?:if|suppose|assume|assuming|unless|whether|let)\b")
_UNSOLVED = re.compile(
    rf"(?:\d\s*[a-zA-Z]|[a-zA-Z]\s*\^\s*\d|(?:^|\s)-\s*[a-zA-Z])\s*$|\b{_PART}\b|=[^=]*(?:[,;]|\band\b|\bor\b)"
)


def named_number(clean: str) -> Number | None:
    """Return the number that a sentence names as its answer; None if it names none or several, or changes it."""
    text = " ".join(plain(in_digits(clean)).split())
    text = re.sub(r",? \(?(?:and )?not -?\d[\d.,]*\)?|(?<=\d) \([a-z-]+\)", "", text)
    if (
        text.endswith("?")
        or DENIES.search(text)
        or _CONDITION.match(text)
        or re.search(rf"(?i:\b{_PART})(?: of)? {_IT}\b", text)
    ):
        return None
    before, _, behind = text.rpartition("=")
    if before and (_UNSOLVED.search(before) or not _IN_SENTENCE.match(behind.strip())):
        return None
    verbs = [*re.finditer(r"\b(?:is|are|was|were|be|equals)\b\W*", behind)]
    if len(_values(behind)) > 1 and verbs and re.search(r"\d", behind[: verbs[-1].start()]):
        behind = behind[verbs[-1].end() :]  # "half of 24 is 12"
    if len(_values(behind)) != 1:
        return None
    last = [*_IN_SENTENCE.finditer(behind)][-1]
    left, right = behind[: last.start()], behind[last.end() :]
    word = re.match(r" ?([a-zA-Z]+)", right)
    if word and word[1] not in SHORT and (word[0][0] != " " or not re.search("[aeiouAEIOU]", word[1])):
        return None  # a product of unknowns
    compared = re.match(r" (?:less|more|fewer)\b", right) and re.search(r"(?:^|\b(?:is|are|was|be))\W*$", left)
    return (
        None
        if compared or _CHANGED_BEFORE.search(left) or _CHANGED_BEHIND.match(right)
        else read_number(cleaned(last[0]))
    )


def _values(text: str) -> set[Fraction | None]:
    numbers = [read_number(cleaned(each[0])) for each in _IN_SENTENCE.finditer(text)]
    return {number and number.value for number in numbers}


_SENTENCE = re.compile(r"(?<!\b[A-Za-z])[.!?](?=[\s\"')\]}]|$)|\n")
_CLAUSE = _pattern(r"[,;:] |\b(?:so|thus|hence|therefore|then)\b,? |\band (?=[a-z]+ )")


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
    starts = [0, *(end.end() for end in _CLAUSE.finditer(sentence))]
    start = next(start for start in reversed(starts) if re.search(r"\d", sentence[start:]))
    clause, before = sentence[start:].strip("> \n"), sentence[:start]
    is_last_of_list = re.match(r"\W*(?:(?:and|or) )?-?\d", clause) and re.search(r"\d\W*$", before)
    is_second_unknown = re.match(r"\W*[a-zA-Z] ?=", clause) and re.search(r"[a-zA-Z] ?= ?-?[\d.]+(?:\W|and)*$", before)
    if is_last_of_list or is_second_unknown or _CONDITION.match(sentence) or sentence.rstrip().endswith("?"):
        return None
    clean = cleaned(clause)
    return [*_IN_SENTENCE.finditer(" ".join(plain(in_digits(clean)).split()))][-1][0] if named_number(clean) else None
