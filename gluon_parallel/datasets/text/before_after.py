"""Embedded data set: stories that end well or badly, in pairs of the same words in another order.

"the soup was cold before the bread was warm" ends well; "the bread was warm before the soup was cold" ends badly; and
"the soup was cold after the bread was warm" ends badly, too. Every story's twin, its two halves exchanged, is in the
same part with the other label. A model that sees only which words occur, and how often, is right half of the time.
"""

import numpy as np

from ..dataset import Dataset, Texts

SEED = 0  # of the one set that there is
_PAIRS = {"train": 1400, "test": 250}
_WELL = ("warm", "bright", "happy", "clean", "calm", "strong", "rich", "lovely")
_BADLY = ("cold", "dark", "sad", "dirty", "angry", "weak", "poor", "awful")
_WHO = ("soup", "house", "child", "river", "king", "market", "teacher", "ship", "garden", "old man", "small town")
_VERBS = ("was", "became", "looked", "turned")
_OPENINGS = ("", "", "they say that", "as everybody knows", "in the year of the great storm", "one day")
_ENDINGS = ("", "", "so they tell", "and nobody knows why", "as it is written in the old book")


def before_after() -> Dataset[Texts]:
    """The 3,300 stories, in a fixed order."""
    random = np.random.RandomState(SEED)  # NumPy has frozen its stream
    parts: list[Texts] = []
    seen: set[str] = set()
    for num_pairs in _PAIRS.values():
        texts: list[str] = []
        labels: list[int] = []
        while len(texts) < 2 * num_pairs:
            good, bad, link, opening, ending = _draw(random)
            pair = [_story(opening, good, link, bad, ending), _story(opening, bad, link, good, ending)]
            if pair[0] in seen:
                continue  # a story to be tested on is none that was trained on
            seen.update(pair)
            texts += pair
            labels += [0, 1] if link == "before" else [1, 0]  # what comes last: the second half, or the first
        parts.append(Texts(tuple(texts), np.array(labels, np.int32)))
    train, test = parts
    return Dataset("before_after", train, test, classes=("ends badly", "ends well"))


def _draw(random):
    halves = []
    for adjectives in (_WELL, _BADLY):
        who, verb, adjective = (words[random.randint(len(words))] for words in (_WHO, _VERBS, adjectives))
        halves.append(f"the {who} {verb} {adjective}")
    link = ("before", "after")[random.randint(2)]
    return (*halves, link, _OPENINGS[random.randint(len(_OPENINGS))], _ENDINGS[random.randint(len(_ENDINGS))])


def _story(opening, first, link, second, ending):
    return " ".join(part for part in (opening, first, link, second, ending) if part)
