r"""What the words around an answer say: they deny it, change it, take it back, or name another one."""

import re
from functools import partial
from itertools import pairwise

from stepspec.evaluation.grade import number
from stepspec.evaluation.grade.latex import cleaned
from stepspec.evaluation.grade.number import AMOUNT, PARTS, SCALE, Number, in_digits, read_number

_pattern = partial(re.compile, flags=re.IGNORECASE)


def _any(words: str) -> str:
    # `_` stands for a space
    return rf"(?:{'|'.join(words.split())})".replace("_", " ")


_MARKUP = re.compile(
    r"\\?\$|\\[()\[\],;:! ]|\\q?quad(?![a-z])|\*\*|__|`|[*{}](?=\s|$)|(?<=\s)\*|[{}]"
    r"|\\(?:text|textbf|mathrm|mbox|left|right)(?![a-z])"
)


def plain(text: str) -> str:
    """Return a text without markup, with single spaces in its lines."""
    return re.sub(r"[^\S\n]+", " ", _MARKUP.sub("", text.replace("’", "'")))


_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?)"
_UNIT = _any("feet foot ft hours? hrs? pounds? lbs? minutes? mins? dollars? yards? meters? m km kg days? weeks? years?")
_NOT = _any("not never neither nor cannot no_longer instead_of rather_than unlike anything_but nobody wrong incorrect")
_VERB = _any("is are was were equals gives makes get leaves but so then")
_OF = _any("half third quarter multiple factor square cube root power opposite reciprocal")
PART = rf"(?:half|twice|thrice|double|triple|minus|negative|{_OF}s? of)"
_IT = r"(?:the |my |our )?(?:final |correct )?(?:answer|it|this|that|value)"
_IF = _any("if suppose assume assuming unless whether let")
_RIGHT = r"(?:quite )?(?:the )?(?:\w+ )?(?:right|correct|true|answer|it)\b"
_WRONG = rf"(?:(?:\w+ly |quite )?(?:wrong|incorrect|false|mistaken)|an? (?:mistake|error)|not {_RIGHT})"
_IS_WRONG = rf"{_WRONG}(?! (?:if|when|unless|only)\b)"
_START = r"(?:^|[.!?…\n])\W{0,8}"
DENIES = _pattern(rf"\b(?:{_NOT}|false|different from|far from)\b|n't\b")
# What stands before an answer: a denial, a part, a condition, or the first of two numbers.
_BEFORE = _pattern(
    rf"(?:\b(?:{_NOT}|(?<!no )(?:less|more|other) than)|n't)\b(?: (?!(?:{_VERB}|more|less)\b)[\w']+){{0,3}}[ (]*$"
    rf"|\b{PART}(?: of)?(?: {_IT} (?:is|equals))?[ (:]*$"
    rf"|(?<!only )\b{_IF} (?!and only)(?:(?!\bthen\b|\banswer\b).)*(?: is| are| was| were| be|=)[ (]*$"
    rf"|(?<![\w.,/^*+-])-?\d[\d,.]* ?,? ?(?:(?:or|to|through) |[–—-] ?)\(?$|\d[.,:]$|\d ?{_UNIT} (?:and )?\(?$"
    r"|(?:^|\bare|\bis|[:=,]) ?\(?-?\d[\d.]* ?, ?\(?$"
)
# What stands behind an answer: more digits, a scale, a second unit, a denial, or arithmetic.
_BEHIND = _pattern(
    rf" ?(?:per ?cent|\\?%) ?of\b|,\d{{3}}(?!\d)|, ?-?\d[\d.]* ?(?:[,.)]|$)|(?-i: ?[kKMB])\b(?=$| )|\.\d| ?\?"
    rf"| {_UNIT},? (?:and )?\d| ?(?:{SCALE}|{PARTS})\b| (?:and|plus) \w+ {PARTS}\b"
    rf"|,? ?\(?(?:(?:is|was|are) )?{_IS_WRONG}|,? (?:isn|wasn)'t {_RIGHT}| times (?:as|the|that|\d)"
    r"| (?:squared|cubed|factorial|mod|over|plus|minus)\b| or (?:so|more|less|fewer)\b(?! than)"
)
_ANOTHER = _pattern(
    rf"(?: [a-z]+)?,? ?\(?(?:(?:or|to|through) (?:(?!approx|rough)\w+ly )?|[–—-] ?){_NUMBER}(?![\w.,/^*+-]*[\w/^*])"
)
_TAKEN_BACK = _pattern(
    rf"(?:{_START}|\b(?:but|which|and|so|no|wait|hmm+|actually|oh)\W+)(?:(?:which|that|this|it|(?:the|my) answer) ?)?"
    rf"(?:(?:is|was|seems|must be|'s) {_IS_WRONG}|(?:(?:isn|wasn|can)'t|can ?not) (?:be )?{_RIGHT}|wrong\b(?=[.,!]))"
    r"|\bI (?:have |'ve )?(?:made an? (?:\w+ )?(?:mistake|error|slip)|[wa]\w+ wrong|mis(?:read|counted|calculated))"
    r"|\b(?:scratch|strike|forget|ignore|take) (?:that|it back)\b|\bnever ?mind\b|\bmy (?:mistake|bad|error)\b"
)
_STATES = r"(?:(?:so|then) )?(?:the (?:real |correct |right )?answer|it) ?(?:is|'s|should be|must be)"
_REGRETS = _pattern(
    rf"(?:{_START}|[,;:] ?)(?:no(?=[,.!…—]| wait)|wait|actually|hmm+|oops|sorry|correction|hold on|on second thought"
    rf"|I (?:forgot|missed|overlooked)|{_STATES})\b"
)
_COMES_TO = _pattern(
    rf"(?:\b(?:is|be|equals|get|gives|to|no|wait|actually|oops|correction)|'s|=)\W{{0,5}}?{_NUMBER}(?! ?[-+*/=×])"
)
_CONFIRMS = _pattern(r"\b(?:correct|confirmed|matches|checks out)\W*$")
_NO_ANSWER = _pattern(rf"^\W*{_IF}\b|\b{PART} (?:of )?{_IT}\b|\?$|{DENIES.pattern}")


def is_denied(before: str) -> bool:
    """Return whether the clause that ends in an answer denies it or does something to it."""
    clause = re.split(r"(?:[.!?;:] |\n\s*\n|, )(?!\s*$)", plain(before))[-1]
    return bool(_BEFORE.search(clause.replace("\n", " ")))


def is_changed(behind: str, answer: str) -> bool:
    """Return whether the words directly behind an answer deny it, change it, or add another one."""
    behind = plain(behind.partition("\n")[0])
    other = _ANOTHER.match(behind)
    return bool(_BEHIND.match(behind)) or (other is not None and not _is_same(answer, other[1]))


def is_taken_back(behind: str, answer: str) -> bool:
    """Return whether a text says later that an answer is wrong, or states another number."""
    behind = plain(behind)
    taken = _TAKEN_BACK.search(behind)
    if taken and not re.search(r"\d", behind[: taken.start()]):
        return True
    regret = _REGRETS.search(behind)
    if regret is None or _CONFIRMS.search(behind) or not number_in(cleaned(answer[:100])):
        return False
    others = [match[1] for match in _COMES_TO.finditer(behind, regret.start())]
    return bool(others) and not _is_same(answer, others[-1])


def number_in(clean: str) -> Number | None:
    """Return the number that a cleaned answer is or, as a sentence, names."""
    return read_number(clean) or named_number(clean)


def _is_same(answer: str, other: str) -> bool:
    first, second = number_in(cleaned(answer[:100])), read_number(cleaned(other))
    return first is not None and second is not None and first.equals(second)


_IN_SENTENCE = _pattern(
    rf"(?<![\w.\\^_/+*)\]])-?(?<![\w)\]]-)(?:\d+ \d+/\d+|{number.UNSIGNED}(?:/\d+)?)(?: {SCALE}\b)?(?: ?%)?"
)
_LEFT = _any(
    "times nor base modulo? page option nearly almost between either plus to step equation case problem least most than"
    " out_of instead_of (?:divided|divisible|multiplied)_by"
)
_CHANGED_LEFT = _pattern(rf"(?:\b{_LEFT}|[(\[][^()\[\]]*,|[-+*/^<>_\\]|\\(?:[lgn]?eq|approx)|\w\()[^\w(]*$")
_CHANGED_RIGHT = _pattern(
    rf" ?(?:(?:{'|'.join(number.CHANGES)}|out of|(?:and|but) (?:an?|some|not))\b|(?:to|through|over) \d"
    rf"|(?:[a-z]+ ){{0,3}}{AMOUNT}\b|[-+*/<>=!_(\\^]|[a-z](?![a-z'. ]))"
)
_UNSOLVED = re.compile(
    rf"(?:\d\s*[a-zA-Z]|[a-zA-Z]\s*\^\s*\d|(?:^|\s)-\s*[a-zA-Z])\s*$|\b{PART}\b|=[^=]*(?:[,;]|\band\b|\bor\b)"
)


def named_number(clean: str) -> Number | None:
    """Return the number that a sentence names as its answer; None if it names none or several, or changes it."""
    text = " ".join(plain(in_digits(clean)).split())
    text = re.sub(r",? \(?(?:and )?not -?\d[\d.,]*\)?|(?<=\d)( [a-z]+)? \((?!no\b)[^()=]*\)|\^ ?\\circ", r"\1", text)
    text = re.sub(r"^(\W*[\d.,]+ [a-z]+),? (?:for|because|since|after|in) .*", r"\1", text)
    before, _, behind = text.rpartition("=")
    if before and (_UNSOLVED.search(before) or not _IN_SENTENCE.match(behind.strip())):
        return None
    verbs = [*re.finditer(r"\b(?:is|are|was|were|be|equals)\b\W*", behind)]
    if len(_values(behind)) > 1 and verbs and re.search(r"\d", behind[: verbs[-1].start()]):
        behind = behind[verbs[-1].end() :]  # "half of 24 is 12"
    if len(_values(behind)) != 1 or _NO_ANSWER.search(text):
        return None
    last = [*_IN_SENTENCE.finditer(behind)][-1]
    left, right = behind[: last.start()], behind[last.end() :]
    compared = re.match(r" (?:less|more|fewer)\b", right) and re.search(r"(?:^|\b(?:is|are|was|be))\W*$", left)
    word = re.match(r"[a-zA-Z]+| [^aeiouAEIOU\W\d]+\b", right)
    changed = is_denied(left) or _CHANGED_LEFT.search(left) or _CHANGED_RIGHT.match(right) or compared
    return None if changed or (word and not number.is_unit(word[0])) else read_number(cleaned(last[0]))


def _values(text: str) -> set[Number | None]:
    return {read_number(cleaned(each[0])) for each in _IN_SENTENCE.finditer(text)}


_LINK = rf"\b(?:so|thus|hence|therefore|then)\b,? |\band (?!an? |{AMOUNT})(?=[a-z]+ )"
_END = _pattern(rf"(?<!\b[A-Z])[.!?](?=[\s\"')\]}}]|$)|\n|[,;:] |{_LINK}")


def last_number(text: str) -> tuple[str, str] | None:
    """Return the number that the last clause of a text with a number names, or its last one, and what stands behind."""
    tail = text[-2_000:].rstrip()
    if bold := re.search(r"\*\*([^*\n]*\d[^*\n]*)\*\*[^*\n]*$", tail):
        tail = tail[: bold.end(1)]  # what is emphasized in the last line
    tail = plain(tail)
    ends = [0, *(end.end() for end in _END.finditer(tail)), len(tail)]
    start, end = next(
        span for span in reversed([*pairwise(ends)]) if re.search(r"\d", tail[slice(*span)]) or not span[0]
    )
    clause = " ".join(in_digits(cleaned(tail[start:end].strip("> \n"))).split())
    numbers, named = [each[0] for each in _IN_SENTENCE.finditer(clause)], named_number(clause)
    if not numbers or (named is None and len(_values(clause)) == 1):
        return None
    return next((each for each in numbers if named and read_number(cleaned(each)) == named), numbers[-1]), tail[end:]
