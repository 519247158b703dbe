"""The animated picture of an answer in a terminal."""

import xml.etree.ElementTree as ElementTree

from evals.bench.recording import MAX_LINES, Recorded, Shown, draw


def test_the_picture_is_valid_and_small_and_has_all_that_was_said() -> None:
    answer = Recorded([Shown("5 < 6 & so on.\n\n", "draft", 0.5), Shown("So 11.", "target", 1.25)], 1.5)
    picture = draw('Is "5 < 6"?', "stepspec run", answer, Recorded([], 3.0), "two-level")
    texts = [each.text for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == '$ stepspec run "Is "5 < 6"?"'
    assert [text for text in texts if text] == [
        texts[0],
        "5 < 6 & so on.",
        "So 11.",
        "two-level",
        "1.5 s",
        "target alone",
        "3.0 s",
    ]
    long = Recorded([Shown("A line.\n" * 500, "draft", 1.0)], 1.0)
    picture = draw("Why?", "stepspec run", long, answer, "two-level")
    assert len(picture) < 150_000
    assert picture.count("A line.") == MAX_LINES
