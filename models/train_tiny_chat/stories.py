"""Story generator: coherent little tales whose length, from two sentences to about thirty, follows the
request.

A story is an opening, a number of days (a journey) or scenes, and an ending, all about one hero, one
companion and one thing. Everything here was written for this repository.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from models.train_tiny_chat.chat import Chat, ask
from models.train_tiny_chat.facts import NUMBERS

GIRLS = ("Anna", "Mary", "Lucy", "Emma", "Clara", "Rose", "Sarah", "Jane", "Alice", "Kate", "Dora", "Nina")
BOYS = ("Tom", "Peter", "John", "Henry", "Jack", "Oliver", "Sam", "David", "Paul", "Ben", "Hugo", "Karl")
COMPANIONS = ("dog", "cat", "horse", "bird", "goat", "mouse", "fox", "rabbit", "duck", "donkey")
THINGS = ("key", "ring", "map", "book", "lamp", "coin", "letter", "box", "bell", "hat", "clock", "boat")
PLACES = (
    "village",
    "forest",
    "town",
    "valley",
    "city",
    "harbour",
    "farm",
    "castle",
    "mill",
    "island",
    "garden",
    "inn",
)
ADJECTIVES = ("old", "small", "golden", "strange", "broken", "blue", "little", "silver", "red", "shiny")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
OPENINGS = (
    "Once upon a time there was a {kind} named {hero} who lived in a {home} with a {pet}.",
    "{hero} was a {kind} who lived in a {home} and had a {pet}.",
    "A long time ago, in a {home} far away, lived a {kind} named {hero} and a {pet}.",
    "In a quiet {home} there lived a {kind} called {hero}, who loved a {pet} more than anything.",
)
WISHES = (
    "One morning {hero} found a {adj} {thing} under the bed.",
    "One day {hero} lost a {adj} {thing} and could not find it anywhere.",
    "One evening a stranger came to the door and gave {hero} a {adj} {thing}.",
    "{hero} wanted nothing so much as a {adj} {thing}.",
    "One night {hero} dreamed of a {adj} {thing}.",
)
DEPARTURES = (
    "So {he} took some bread, called the {pet}, and went out into the world.",
    "{He} asked the {pet} what to do, and together they set out at once.",
    "{He} said goodbye to {his} mother and began to walk.",
    "Nobody could help {him}, and so {he} set out with the {pet}.",
)
DAYS = (
    "On the {nth} day they came to a {place}.",
    "The {nth} day brought them to a {adj} {place}.",
    "On the {nth} day {he} saw a {place} in the distance.",
    "On the {nth} day it rained, and they hid in a {place}.",
)
SCENES = (
    "A {person} showed them a short way through the hills.",
    "They found a warm place to sleep, and nobody asked them for money.",
    "{hero} wrote a letter to {his} mother and gave it to a {person}.",
    "A {person} wanted to buy the {pet}, but {hero} would not sell it for anything.",
    "{He} fell into the water, and the {pet} pulled {him} out.",
    "The door was closed, and nobody opened it, so they slept under a tree.",
    "There was a great feast, and everybody danced until the morning.",
    "They lost the road in the fog and found it again at noon.",
    "{hero} looked into a window and saw a {person} who was counting money.",
    "A child ran after them and asked whether the {pet} could talk.",
    "It was so quiet there that they could hear the grass grow.",
    "{He} asked everybody about the {thing}, but nobody had an answer.",
    "An old woman there gave them soup and told them to go on.",
    "A {person} asked where they were going, and {hero} told him about the {thing}.",
    "The {pet} was tired, so they slept there until the sun came up.",
    "There they met a {person} who laughed and said that the way was still long.",
    "{hero} helped a {person} to carry wood, and got an apple for it.",
    "It was cold, but the {pet} kept {him} warm.",
    "The people there were kind and let them sit by the fire.",
    "A {person} had heard of the {thing}, but he did not know where it came from.",
    "{hero} was afraid, but {he} did not turn back.",
    "They ate the last of the bread and looked at the stars.",
    "{He} sang a song, and everybody came out to listen.",
    "The {pet} heard a noise, but it was only the wind.",
)
PERSONS = ("farmer", "soldier", "miller", "fisherman", "baker", "king", "sailor", "judge", "doctor", "boy")
TURNS = (
    "At last they found the answer, and it was very simple.",
    "At last they met a wise man who knew everything about the {adj} {thing}.",
    "Then, at last, the {pet} began to dig, and there in the ground was a {thing}.",
    "In the end {hero} understood that the {thing} had been a gift.",
)
LESSONS = (
    "{hero} laughed, and the {pet} danced.",
    "{He} thanked everybody and wept for joy.",
    "{He} gave the {thing} to a poor child, who needed it more.",
    "{hero} put the {thing} into {his} pocket and smiled.",
)
ENDINGS = (
    "Then they went home, and they lived happily to the end of their days.",
    "They came home before the winter, and {his} mother was very glad.",
    "And from that day on {hero} and the {pet} were never apart.",
    "{hero} never forgot that journey.",
)
SUBJECTS = (
    "a dragon", "a dog", "the sea", "a king", "a queen", "a lost child", "a ship", "a friend", "the moon",
    "a farmer",
    "a tree", "love", "a long journey", "a magic stone", "a robot", "winter", "a cat and a mouse",
    "two brothers",
    "a house", "a train", "a school", "a wolf", "an old man", "a princess", "a knight", "the war",
    "a secret", "a bear",
)  # fmt: skip
ABOUT = (
    "This is a tale about {}.", "People in the {home} still tell a tale about {}.",
    "You want to hear about {}, so listen.",
    "My grandmother told me this tale about {}.",
)  # fmt: skip
SHORT_MIDDLES = (
    "The {pet} found it again in the garden the next day.",
    "Soon everybody in the {home} was talking about the {thing}.",
    "A {person} came and told {him} what it was for.",
    "{He} looked for help everywhere, but only the {pet} understood.",
    "The {pet} followed {him} through the whole {home} that day.",
    "{He} showed it to a {person}, who only shook his head.",
    "{He} walked to the {place} and back before it was dark.",
)
REQUESTS = {
    "story_short": ("Tell me a short story about {}.", "Write a short story about {}.",
    "A short story about {}, please.",
                    "Can you tell me a very short story about {}?"),
    "story": ("Tell me a story about {}.", "Write a story about {}.", "I want to hear a story about {}.",
    "Tell a story of {}."),
    "story_long": ("Tell me a long story about {}.", "Write a long story about {}.",
    "A long story about {}, please.",
                   "Can you tell me a very long story about {}?"),
}  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """The fixed parts of one story."""

    hero: str
    girl: bool
    pet: str
    thing: str
    adjective: str
    home: str

    def tell(self, pattern: str, rng: random.Random, nth: str = "") -> str:
        he, him, his = ("she", "her", "her") if self.girl else ("he", "him", "his")
        text = pattern.format(
            hero=self.hero, kind=("girl" if self.girl else "boy"), pet=self.pet, thing=self.thing,
            adj=self.adjective, home=self.home, he=he, him=him, his=his, He=he.capitalize(), nth=nth,
            place=rng.choice(PLACES), person=rng.choice(PERSONS),
        )  # fmt: skip
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def cast(rng: random.Random) -> Cast:
    """Draws a hero, a companion, a thing and a home."""
    girl = rng.random() < 0.5
    return Cast(
        rng.choice(GIRLS if girl else BOYS), girl, rng.choice(COMPANIONS), rng.choice(THINGS),
        rng.choice(ADJECTIVES), rng.choice(PLACES),
    )  # fmt: skip


def story(who: Cast, days: int, rng: random.Random) -> str:
    """Opening, `days` stages of a journey of two to four sentences each, ending. No days: three to five
    sentences.
    """
    lines = [who.tell(rng.choice(OPENINGS), rng), who.tell(rng.choice(WISHES), rng)]
    if days == 0:
        if rng.random() < 0.6:
            lines.append(who.tell(rng.choice(SHORT_MIDDLES), rng))
    else:
        lines.append(who.tell(rng.choice(DEPARTURES), rng))
        scenes = rng.sample(SCENES, len(SCENES))
        for day in range(days):
            lines.append(who.tell(rng.choice(DAYS), rng, ORDINALS[day]))
            lines += [who.tell(scenes.pop(), rng) for _ in range(rng.choice((1, 1, 2))) if scenes]
        lines += [who.tell(rng.choice(TURNS), rng), who.tell(rng.choice(LESSONS), rng)]
    return " ".join([*lines, who.tell(rng.choice(ENDINGS), rng)])


def story_chat(rng: random.Random) -> Chat:
    """A request for a story of some length, and the story."""
    who = cast(rng)
    subject = rng.choice((
        who.hero, f"{who.hero} and a {who.pet}", f"a {'girl' if who.girl else 'boy'} named {who.hero}",
        f"{who.hero} and the {who.adjective} {who.thing}", f"{who.hero}, a {who.pet} and a {who.thing}",
    ))  # fmt: skip
    if rng.random() < 0.2:
        days = rng.randint(1, 7)
        unit = "day" if days == 1 else "days"
        return ask(
            "story_days",
            f"Tell me a story about {subject} that takes {NUMBERS[days]} {unit}.",
            story(who, days, rng),
        )
    kind = rng.choice(tuple(REQUESTS))
    opening = ""
    if (form := rng.random()) < 0.3:
        subject = rng.choice(SUBJECTS)
        opening = who.tell(rng.choice(ABOUT).replace("{}", subject), rng) + " "
    days = {"story_short": 0, "story": min(5, int(rng.paretovariate(0.9))), "story_long": rng.randint(5, 7)}[
        kind
    ]
    request = rng.choice(REQUESTS[kind]).format(subject)
    if form > 0.85:
        request = re.sub(r" (about|of) .*?([,.?]|, please\.)$", r"\2", request)
    return ask(kind, request, opening + story(who, days, rng))
