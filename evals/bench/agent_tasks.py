"""Tasks for `python -m evals.bench agent`: three questions in one conversation, each of which needs a tool.

The second and the third question refer to the result before them ("Convert this temperature to Fahrenheit."), and every
result is made up, so that no question can be answered without the tools. Tasks with the same seed are the same.
"""

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PEOPLE: Sequence[str] = (
    "Anna",
    "Ben",
    "Emma",
    "Hugo",
    "Julia",
    "Leo",
    "Lucy",
    "Max",
    "Nora",
    "Omar",
    "Paul",
    "Sarah",
    "Tom",
    "Zoe",
)
CITIES: Sequence[str] = (
    "Berlin",
    "Boston",
    "Cairo",
    "Chicago",
    "Denver",
    "Lisbon",
    "London",
    "Madrid",
    "Oslo",
    "Paris",
    "Rome",
)
ITEMS: Sequence[str] = (
    "bag",
    "bed",
    "book",
    "camera",
    "chair",
    "clock",
    "desk",
    "guitar",
    "jacket",
    "kettle",
    "lamp",
    "table",
)
TEAMS: Sequence[str] = ("Bears", "Eagles", "Foxes", "Hawks", "Lions", "Tigers", "Wolves")
EURO_CENTS = 90
"""Price of a dollar. Prices of items are multiples of 10 dollars, so that amounts are whole."""

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

Value = str | int


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. `parameters` has the JSON type of each argument, `string` or `integer`."""

    name: str
    description: str
    parameters: Mapping[str, str]
    function: Callable[..., Value]
    """Takes the arguments by position. A KeyError means that it knows no such name."""
    commutative: bool = False
    """Whether the order of the arguments does not matter."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}

    @property
    def described(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's API."""
        about = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": about}

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the result as text, or the reason why there is none, which the model reads instead."""
        if arguments.keys() != self.parameters.keys():
            return f"Error: {self.name} needs {', '.join(self.parameters)}."
        for name, kind in self.parameters.items():
            if type(arguments[name]) is not (int if kind == "integer" else str):
                return f"Error: {name} must be of type {kind}."
        try:
            return str(self.function(*(arguments[name] for name in self.parameters)))
        except KeyError:
            return f"Error: {self.name} knows nothing about {next(iter(arguments.values()))!r}."

    def same(self, arguments: Mapping[str, Any], wanted: Mapping[str, Value]) -> bool:
        """Whether arguments are the wanted ones. Upper and lower case of a name count as the same."""
        if arguments.keys() != wanted.keys():
            return False
        own, others = ([_plain(each[name]) for name in wanted] for each in (arguments, wanted))
        return sorted(own, key=repr) == sorted(others, key=repr) if self.commutative else own == others


def _plain(value: Any) -> Any:
    return value.strip().casefold() if isinstance(value, str) else value


@dataclass(frozen=True)
class Call:
    """A tool call of the model. `arguments` is None if they are not a JSON object."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True)
class Turn:
    """A question, the tool call that it needs, and the answer."""

    question: str
    tool: Tool
    arguments: Mapping[str, Value]
    answer: Value

    def is_right(self, calls: Sequence[Call]) -> bool:
        """Whether these calls are exactly the wanted one."""
        if len(calls) != 1 or calls[0].arguments is None:
            return False
        return calls[0].name == self.tool.name and self.tool.same(calls[0].arguments, self.arguments)

    def is_answered(self, text: str) -> bool:
        """Whether a text gives the answer: it contains the name, or its last number is the answer."""
        if isinstance(self.answer, str):
            return self.answer.casefold() in text.casefold()
        numbers = [each.replace(",", "") for each in NUMBER.findall(text)]
        return bool(numbers) and float(numbers[-1]) == self.answer


@dataclass(frozen=True)
class Task:
    """Three turns with the tools of all of them, in random order."""

    tools: Sequence[Tool]
    turns: Sequence[Turn]

    def call(self, call: Call) -> str:
        """Return what a tool call returns to the model."""
        tool = next((each for each in self.tools if each.name == call.name), None)
        if tool is None:
            return f"Error: there is no tool {call.name}."
        return tool.call(call.arguments) if call.arguments is not None else "Error: the arguments are not valid JSON."


def make_tasks(count: int, seed: int) -> list[Task]:
    """Return tasks, the kinds of `KINDS` in turn."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    for number in range(count):
        turns = KINDS[number % len(KINDS)](rng)
        tools = [turn.tool for turn in turns]
        rng.shuffle(tools)
        tasks.append(Task(tuple(tools), turns))
    return tasks


def _weather(rng: random.Random) -> tuple[Turn, ...]:
    homes = dict(zip(rng.sample(PEOPLE, 5), rng.sample(CITIES, 5), strict=True))
    person = rng.choice([*homes])
    temperatures = {city: rng.randrange(5, 40, 5) for city in homes.values()}
    home = _lookup("home_of", "Returns the city that a person lives in.", "person", homes)
    temperature = _lookup("temperature_in", "Returns the temperature in a city in Celsius.", "city", temperatures)
    return (
        _turn(f"Which city does {person} live in?", home, person),
        _turn("What is the temperature in that city?", temperature, homes[person]),
        _turn("Convert this temperature to Fahrenheit.", TO_FAHRENHEIT, temperatures[homes[person]]),
    )


def _shopping(rng: random.Random) -> tuple[Turn, ...]:
    prices = {item: rng.randrange(20, 100, 10) for item in rng.sample(ITEMS, 5)}
    item, many = rng.choice([*prices]), rng.randint(2, 6)
    price = _lookup("price_of", "Returns the price of an item in dollars.", "item", prices)
    return (
        _turn(f"What is the price of a {item}?", price, item),
        _turn(f"Multiply this price by {many}.", MULTIPLY, prices[item], many),
        _turn("Convert this amount to euros.", TO_EUROS, prices[item] * many),
    )


def _trip(rng: random.Random) -> tuple[Turn, ...]:
    distances = {city: rng.randint(20, 400) for city in rng.sample(CITIES, 5)}
    city, more = rng.choice([*distances]), rng.randint(5, 40)
    distance = _lookup("distance_to", "Returns the distance to a city in kilometers.", "city", distances)
    return (
        _turn(f"What is the distance to {city}?", distance, city),
        _turn(f"Add {more} to this distance.", ADD, distances[city], more),
        _turn("Convert this distance to meters.", TO_METERS, distances[city] + more),
    )


def _sports(rng: random.Random) -> tuple[Turn, ...]:
    teams = dict(zip(rng.sample(PEOPLE, 5), rng.sample(TEAMS, 5), strict=True))
    person, more = rng.choice([*teams]), rng.randint(2, 20)
    points = {team: rng.randint(10, 90) for team in teams.values()}
    team = _lookup("team_of", "Returns the team that a person plays for.", "person", teams)
    score = _lookup("points_of", "Returns the points of a team.", "team", points)
    return (
        _turn(f"Which team does {person} play for?", team, person),
        _turn("How many points does this team have?", score, teams[person]),
        _turn(f"Add {more} to these points.", ADD, points[teams[person]], more),
    )


def _to_fahrenheit(celsius: int) -> int:
    return celsius * 9 // 5 + 32


def _to_euros(dollars: int) -> int:
    return dollars * EURO_CENTS // 100


def _to_meters(kilometers: int) -> int:
    return kilometers * 1000


KINDS = (_weather, _shopping, _trip, _sports)

NUMBERS = {"a": "integer", "b": "integer"}
ADD = Tool("add", "Adds two numbers.", NUMBERS, operator.add, commutative=True)
MULTIPLY = Tool("multiply", "Multiplies two numbers.", NUMBERS, operator.mul, commutative=True)
TO_FAHRENHEIT = Tool("to_fahrenheit", "Converts Celsius to Fahrenheit.", {"celsius": "integer"}, _to_fahrenheit)
TO_EUROS = Tool("to_euros", "Converts dollars to euros.", {"dollars": "integer"}, _to_euros)
TO_METERS = Tool("to_meters", "Converts kilometers to meters.", {"kilometers": "integer"}, _to_meters)


def _lookup(name: str, description: str, argument: str, table: Mapping[str, Value]) -> Tool:
    """Return a tool that looks up a name in a table, in upper or lower case."""
    folded = {key.casefold(): value for key, value in table.items()}

    def look_up(key: str) -> Value:
        return folded[_plain(key)]

    return Tool(name, description, {argument: "string"}, look_up)


def _turn(question: str, tool: Tool, *values: Value) -> Turn:
    arguments = dict(zip(tool.parameters, values, strict=True))
    return Turn(question, tool, arguments, tool.function(*values))
