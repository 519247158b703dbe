"""Word lists of the graders: units, number words, and words that deny or change a nearby number.

These are fixed lists, because a grader that guesses the effect of a word accepts wrong answers. An ambiguous word is on
the list that rejects the answer.
"""

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NUMBER_WORDS = _words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion
    quadrillion hundreds thousands millions billions trillions half halves third thirds quarter quarters fourth fourths
    fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths twelfth twelfths hundredth
    hundredths thousandth thousandths millionth millionths ones twos threes tens twenties"""
)

HYPERBOLIC = _words("sinh cosh tanh coth sech csch arcsec arccsc arccot arcsinh arccosh arctanh")
# After a number, these words change it: "12 dozen", "12 squared", "12 less than 20", "12 or more".
CHANGES_BEHIND = (
    NUMBER_WORDS
    | HYPERBOLIC
    | _words(
        """and or over nor but to mod modulo plus minus times less more fewer than divided multiplied
        halved doubled tripled dozen dozens pair pairs couple couples score gross grand lakh crore mil mils factorial
        squared cubed short below
    above under beyond point percentile remainder choose raised power exponent root negative ish something odd zeros
    zeroes digits minimum maximum approximately infinity infty pi sqrt sin cos tan cot csc log ln exp lim arcsin
    arccos arctan base bases sum wrong incorrect false not never left-over plus-minus inverse reciprocal"""
    )
)
_CHANGES_BEHIND_PATTERN = "|".join(
    sorted(CHANGES_BEHIND - _words("and but to over short odd squared cubed below under"))
)
# In a sentence, prepositions and "and" usually start another phrase, so they count only directly after the number.
CHANGES_IN_SENTENCE = re.compile(
    rf"\b(?:{_CHANGES_BEHIND_PATTERN})\b|\bbelow\s+zero\b|(?<![a-z]\s)\b(?:squared|cubed)\b"
    r"|^\W*(?:and|but|to|over|short|odd|below|under|by|out\s+of)\b|\b(?:at|the)\s+(?:most|least)\b|\bper\s*cent\s+of\b"
    r"|\band\s+(?:a\s+|some\b|change\b|bits?\b|then\s+some\b)",
    re.IGNORECASE,
)

DENIES = re.compile(
    r"\b(?:not|cannot|never|neither|nor|no|nope|nobody|none|nothing|without|wrong|incorrect|incorrectly|false|untrue|impossible|unlikely"
    r"|hardly|except|excluding|unequal|differs|different\s+(?:from|than|to|answer|number|value)|(?:be|is|was|a|quite|very)\s+different|mistaken|mistake|error|doubt|disagree|instead|rather|unknown"
    r"|anything\s+but|far\s+from|fails?)\b|n['’]t\b|\\n(?:eq?|ot)(?![a-zA-Z])|≠",
    re.IGNORECASE,
)

# In a sentence that names a number, these words make it a guess, a condition or a range.
HEDGES = re.compile(
    r"\b(?:if|unless|whether|maybe|perhaps|possibly|might|suppose|supposing|assum\w+|guess\w*|try|tried|say|says|let"
    r"|either|between|ranges?|pretend|imagine|wait|hmm|unsure|because\s+of)\b",
    re.IGNORECASE,
)

# Before a number in its clause, these words mean that it is half, twice or the opposite of the requested value.
CHANGES_SUBJECT = re.compile(
    r"\b(?:half|halves|(?:third|quarter|fourth|fifth|sixth|tenth)s?\s+(?:of|the|as)|twice|thrice|doubled?|tripled?|triple"
    r"|quadrupled?|minus|negative|opposite|reciprocal|inverse|negation|(?<!the\s)percent"
    r"|(?:an?|one|some|any|every|its)\s+(?:\w+\s+)?(?:multiple|factor|divisor)s?|modulo|mod|in\s+base"
    r"|(?:square|cube)\s+of|squared|cubed|either|between)\b",
    re.IGNORECASE,
)
# Words that change a number if they are between the verb and the number.
CHANGES_BEFORE = re.compile(
    rf"\b(?:{'|'.join(sorted(NUMBER_WORDS | _words('plus times power powers square cube root roots log dozen pair')))}"
    r"|squared|cubed|multiples?|factors?|divisors?|base|than|by|under|over|below|above|beyond|within|nearly|almost|about|around|roughly|approximately"
    r"|close|near|least|most|up\s+to|from|until|per|every|exceeds?|exceeding|out\s+of|fraction"
    r"|another|other|extra|additional)\b|\\approx|~",
    re.IGNORECASE,
)
COPULA = re.compile(
    r"\b(?:is|are|was|were|be|been|equals?|becomes?|gives?|yields?|makes?|has|have|had|gets?|needs?|costs?|earns?)\b|\b(?:equal|comes|amounts|adds\s+up|sums|simplifies|reduces)\s+to\b"
    r"|[=:]",
    re.IGNORECASE,
)
# "of 12" names 12 only after these nouns: "a total of 12", but not "half of 12" or "a multiple of 12".
OF_TOTAL = re.compile(
    r"\b(?:total|sum|value|cost|price|profit|answer|amount|number|length|width|height|area|volume|speed|distance|age"
    r"|weight|average|mean|maximum|minimum|score|balance|rate|difference|product|result|perimeter|radius|revenue"
    r"|income|salary|loss|change|tip|discount)\s+of\b",
    re.IGNORECASE,
)
# "step 12" is a label, not a quantity.
LABELS = re.compile(
    r"\b(?:steps?|equations?|eq|problems?|questions?|pages?|cases?|chapters?|sections?|figures?|tables?|options?"
    r"|versions?|exercises?|examples?|lines?|lemma|theorem|parts?|items?|notes?|rules?|methods?|no|nr)\W{0,3}$",
    re.IGNORECASE,
)

_CANONICAL_UNITS = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "inch": "inch inches",
    "foot": "ft feet foot",
    "yard": "yd yds yard yards",
    "mile": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kgs kilogram kilograms",
    "ounce": "oz ounce ounces",
    "pound": "lb lbs pound pounds",
    "ml": "ml mL milliliter milliliters",
    "liter": "l L liter liters litre litres",
    "gallon": "gallon gallons gal",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "d day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "km/h": "km/h kmh kph",
    "mph": "mph",
    "cent": "cent cents",
    "dollar": "dollar dollars USD",
    "degree": "degree degrees deg",
    "radian": "rad radian radians",
    "unit": "unit units",
}
CANONICAL_UNIT = {way: unit for unit, ways in _CANONICAL_UNITS.items() for way in ways.split()}
"""The canonical name of each unit. Units with different canonical names are not equal."""

_QUANTITIES = (
    _words("mm cm m km inch foot yard mile"),
    _words("mg g kg ounce pound"),
    _words("ml liter gallon"),
    _words("second minute hour day week month year"),
    _words("cent dollar"),
    _words("degree minute second"),
)

SHORT_UNITS = frozenset(way for way in CANONICAL_UNIT if 2 <= len(way) <= 3) | _words(
    """in a an per of the all am pm AM PM kWh kW Hz rpm mol cat cats dog dogs cow cows pig pigs hen hens egg eggs cup
    cups can cans car cars bus man men boy boys pen pens bag bags box toy toys cap caps hat hats pie pies bar bars jar
    jars way ways pts km2 cm2 m2 fox ant ants bee bees bat bats kid kids day cds map maps net ton tons tie ties tub tip
    for big red old new sq cu cc hp A.M. P.M. a.m. p.m."""
)
"""Words of up to three letters that may follow a number and a space. Others are products of unknowns."""
SHORT_WORDS = SHORT_UNITS | _words(
    """of at on by as if so is he we it to are was has had can may who and the not but did got now too yet any due off
    per via she its his her our you out hot ice tea oil art pet nut gem pin pot pan tap leg arm toe row gyms"""
)
"""Short words that may follow a number in a sentence."""
GLUED_UNITS = _words(
    """mm cm km kg mg ml mL ft lb lbs oz hr hrs min mins sec mph kph km/h kWh cent cents dollars hours minutes seconds
    days am pm AM PM a.m. p.m. a.m p.m st nd rd th"""
)
"""Units and suffixes that may follow a number without a space."""
LETTER_UNITS = _words("m g s h L l C F K N J W V A d")
"""Single letters that are units inside `\\text`."""

_TIME_OR_UNIT_TEXT = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


def same_quantity(unit: str, other: str) -> bool:
    """Return whether two different units measure the same quantity, such as feet and inches."""
    units = {CANONICAL_UNIT.get(unit), CANONICAL_UNIT.get(other)}
    return len(units) == 2 and any(units <= each for each in _QUANTITIES)


def is_long_word(text: str) -> bool:
    """Return whether letters after a number are a word (`apples`), not a product of unknowns (`wxyz`, `abcd`)."""
    return len(text) > 3 and bool(_VOWEL.search(text)) and text.casefold() not in _ALPHABET


_VOWEL = re.compile(r"[aeiouAEIOU]")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def changes_number(text: str) -> bool:
    """Return whether any word of a unit changes the number before it."""
    return any(word.casefold() in CHANGES_BEHIND for word in _TIME_OR_UNIT_TEXT.findall(text))


def is_unit_text(text: str) -> bool:
    r"""Return whether the words in `\text` after a value leave the value unchanged."""
    bare = text.strip(" .")
    return (len(bare) > 1 or bare in LETTER_UNITS) and not changes_number(text) and not DENIES.search(text)


def unit_in(text: str) -> str | None:
    """Return the canonical name of the first known unit in a text; None if there is none."""
    return next((CANONICAL_UNIT[word] for word in re.findall(r"[A-Za-z/]+", text) if word in CANONICAL_UNIT), None)
