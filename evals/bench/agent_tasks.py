"""Tasks for `python -m evals.bench agent`: three to five questions in one conversation, and the tools that they need.

The tools are real: a SQLite database, files in a temporary folder, and a calculator. A task is solved if at its end the
rows of the database and the contents of the files are what the wanted calls leave behind, and the last answer has the
wanted number or name. Tasks with the same seed are the same.
"""

import ast
import json
import operator
import random
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from stepspec.errors import UsageError

PEOPLE: Sequence[str] = ("Anna", "Ben", "Emma", "Hugo", "Julia", "Leo", "Nora", "Omar", "Paul", "Tom")
CITIES: Sequence[str] = ("Berlin", "Boston", "Cairo", "Denver", "Lisbon", "London", "Madrid", "Oslo", "Paris", "Rome")
ITEMS: Sequence[str] = ("bag", "bed", "book", "camera", "chair", "clock", "desk", "guitar", "jacket", "lamp", "table")
DELAYS_S: Sequence[float] = (0.0, 0.3, 0.6, 1.0)
"""Seconds that tools with a database or files wait before they answer, as real ones do. The tasks of a kind take
turns."""
SLOW_S = 0.3
"""Delay from which a tool is slow. Slow tools that only read may start early."""

TABLES: Mapping[str, Sequence[str]] = {"products": ("name", "price", "stock"), "people": ("name", "city", "phone")}

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

Value = str | int


class World:
    """A database and files in a folder, which the tools of one run read and change."""

    def __init__(self, folder: Path, rows: Mapping[str, Sequence[Sequence[Value]]], files: Mapping[str, str]) -> None:
        self._files, self._database = folder / "files", folder / "data.sqlite"
        self._files.mkdir(parents=True)
        for name, text in files.items():
            (self._files / name).write_text(text, "utf-8")
        with closing(sqlite3.connect(self._database)) as database, database:
            for table, columns in TABLES.items():
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows.get(table, ()))

    def state(self) -> tuple[dict[str, list[Any]], dict[str, str]]:
        """Return the rows of all tables, and the text of all files."""
        rows = {table: sorted(map(list, self.select(f"SELECT * FROM {table}")), key=repr) for table in TABLES}
        files = {file.name: file.read_text("utf-8").strip() for file in self._files.iterdir()}
        return rows, files

    def select(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        """Return the rows of a query, which cannot change anything."""
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as database:
            return database.execute(sql, values).fetchall()

    def change(self, sql: str, *values: Value) -> int:
        """Change the database. Return the number of rows."""
        with closing(sqlite3.connect(self._database)) as database, database:
            return database.execute(sql, values).rowcount

    def file(self, name: str) -> Path:
        """Return the path of a file. Its name has no folder."""
        return self._files / Path(name).name

    def names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(file.name for file in self._files.iterdir())


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. `parameters` has the JSON type of each argument, `string` or `integer`."""

    name: str
    description: str
    parameters: Mapping[str, str]
    function: Callable[..., str]
    """Takes the world, then the arguments by position. What it raises is an error that the model reads."""
    reads: bool = True
    """Whether it only reads, so that it may run for nothing."""
    waits: bool = True
    """Whether it takes the time of the task's slow tools."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}


@dataclass(frozen=True)
class Call:
    """A tool call of the model. `arguments` is None if they are not a JSON object."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True)
class Turn:
    """A question, and the tool call that it needs."""

    question: str
    call: Call
    found: str | None = None
    """What the result of a right call contains; None if it is the result of the wanted call."""


@dataclass(frozen=True)
class Task:
    """The questions of a conversation, the tools, and what these begin with."""

    tools: Sequence[Tool]
    turns: Sequence[Turn]
    answer: Value | None
    """Number or name in the last answer; None if only the state counts."""
    delay_s: float
    rows: Mapping[str, Sequence[Sequence[Value]]] = field(default_factory=dict[str, Sequence[Sequence[Value]]])
    files: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def early(self) -> list[str]:
        """Names of the tools that may start early: those that are slow and only read."""
        return [tool.name for tool in self.tools if tool.reads and tool.waits and self.delay_s >= SLOW_S]

    def world(self, folder: Path) -> World:
        """Return a new world in an empty folder."""
        return World(folder, self.rows, self.files)

    def call(self, call: Call, world: World) -> str:
        """Run a tool. Return its result as text, or the reason why there is none, which the model reads instead."""
        tool = next((each for each in self.tools if each.name == call.name), None)
        if tool is None:
            return f"Error: there is no tool {call.name}."
        if call.arguments is None or call.arguments.keys() != tool.parameters.keys():
            return f"Error: {tool.name} needs {', '.join(tool.parameters) or 'no arguments'}."
        time.sleep(self.delay_s if tool.waits else 0)
        for name, kind in tool.parameters.items():
            if type(call.arguments[name]) is not (int if kind == "integer" else str):
                return f"Error: {name} must be of type {kind}."
        try:
            return tool.function(world, *(call.arguments[name] for name in tool.parameters))
        except (sqlite3.Error, OSError, UsageError, ArithmeticError) as error:
            return f"Error: {error}"

    def wanted(self, folder: Path) -> tuple[list[str], Any]:
        """Return the result of each turn's wanted call, and the state after them."""
        world = self.world(folder)
        quick = Task(self.tools, self.turns, self.answer, 0.0)
        results = [quick.call(turn.call, world) for turn in self.turns]
        return results, world.state()

    def is_answered(self, text: str) -> bool:
        """Whether a text has the answer."""
        if self.answer is None or isinstance(self.answer, str):
            return (self.answer or "").casefold() in text.casefold()
        return any(float(each.replace(",", "")) == self.answer for each in NUMBER.findall(text))


def is_right(turn: Turn, wanted: str, call: Call, result: str) -> bool:
    """Whether a call did what the wanted one does: the same tool, with its result or what a right result contains."""
    return call.name == turn.call.name and (result == wanted if turn.found is None else turn.found in result)


# Tools


def _find(table: str) -> Callable[[World, str], str]:
    def find(world: World, name: str) -> str:
        rows = world.select(f"SELECT * FROM {table} WHERE lower(name) = ?", name.strip().lower())
        if not rows:
            raise UsageError(f"there is no {name!r}.")
        return json.dumps(dict(zip(TABLES[table], rows[0], strict=True)))

    return find


def _set_stock(world: World, name: str, stock: int) -> str:
    if not world.change("UPDATE products SET stock = ? WHERE lower(name) = ?", stock, name.strip().lower()):
        raise UsageError(f"there is no {name!r}.")
    return f"The stock of {name.strip().lower()} is {stock}."


def _add_person(world: World, name: str, city: str, phone: str) -> str:
    world.change("INSERT INTO people VALUES (?, ?, ?)", name, city, phone)
    return f"Added {name}, {city}, {phone}."


def _query(world: World, sql: str) -> str:
    return json.dumps(world.select(sql))


def _update(world: World, sql: str) -> str:
    return f"Rows changed: {world.change(sql)}."


def _list_files(world: World) -> str:
    return "\n".join(world.names())


def _read_file(world: World, name: str) -> str:
    return world.file(name).read_text("utf-8")


def _write_file(world: World, name: str, text: str) -> str:
    world.file(name).write_text(text, "utf-8")
    return f"Wrote {len(text.strip())} characters to {Path(name).name}."


OPERATIONS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: cast("Any", operator).truediv,
}


def _calculate(_: World, expression: str) -> str:
    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise UsageError("only numbers, + - * / and parentheses.")

    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{expression!r} is not an expression.") from error
    return f"{value(tree.body):.10g}"


FIND_PRODUCT = Tool("find_product", "Finds price and stock of a product.", {"name": "string"}, _find("products"))
SET_STOCK = Tool(
    "set_stock", "Sets the stock of a product.", {"name": "string", "stock": "integer"}, _set_stock, reads=False
)
FIND_PERSON = Tool("find_person", "Finds city and phone of a person.", {"name": "string"}, _find("people"))
ADD_PERSON = Tool(
    "add_person", "Adds a person.", {"name": "string", "city": "string", "phone": "string"}, _add_person, reads=False
)
ABOUT = "The only table is products(name, price, stock)."
QUERY = Tool("query", f"Runs a SELECT statement on the database. {ABOUT}", {"sql": "string"}, _query)
UPDATE = Tool("update", f"Runs an UPDATE statement on the database. {ABOUT}", {"sql": "string"}, _update, reads=False)
LIST_FILES = Tool("list_files", "Lists the names of all files.", {}, _list_files)
READ_FILE = Tool("read_file", "Reads a file.", {"name": "string"}, _read_file)
WRITE_FILE = Tool(
    "write_file", "Writes text to a file.", {"name": "string", "text": "string"}, _write_file, reads=False
)
CALCULATE = Tool(
    "calculate", "Computes an expression, such as 3 * (4 + 5).", {"expression": "string"}, _calculate, waits=False
)


# Tasks


def make_tasks(count: int, seed: int) -> list[Task]:
    """Return tasks, the kinds of `KINDS` in turn."""
    rng = random.Random(seed)
    return [KINDS[number % len(KINDS)](rng, DELAYS_S[number // len(KINDS) % len(DELAYS_S)]) for number in range(count)]


def _turn(question: str, tool: Tool, *values: Value, found: str | None = None) -> Turn:
    return Turn(f"{question} Use {tool.name}.", Call(tool.name, dict(zip(tool.parameters, values, strict=True))), found)


def _products(rng: random.Random) -> list[tuple[str, int, int]]:
    prices = rng.sample(range(11, 90), 5)
    return [(name, price, rng.randint(5, 60)) for name, price in zip(rng.sample(ITEMS, 5), prices, strict=True)]


def _people(rng: random.Random) -> list[tuple[str, str, str]]:
    places = zip(rng.sample(PEOPLE, 5), rng.sample(CITIES, 5), strict=True)
    return [(name, city, f"555-{rng.randint(1000, 9999)}") for name, city in places]


def _stock(rng: random.Random, delay_s: float) -> Task:
    products, many, stock = _products(rng), rng.randint(3, 9), rng.randint(61, 99)
    name, price, _ = products[0]
    turns = (
        _turn(f"What is the price of the product {name}?", FIND_PRODUCT, name),
        _turn(f"Set the stock of the product {name} to {stock}.", SET_STOCK, name, stock),
        _turn(f"Calculate {many} * {price}.", CALCULATE, f"{many} * {price}"),
    )
    return Task((FIND_PRODUCT, SET_STOCK, CALCULATE), turns, many * price, delay_s, {"products": products})


def _notes(rng: random.Random, delay_s: float) -> Task:
    person, city, hour = rng.choice(PEOPLE), rng.choice(CITIES), rng.randint(2, 11)
    text = f"Meet {person} in {city} at {hour} pm and bring the {rng.choice(ITEMS)}."
    turns = (
        _turn("Which files are there?", LIST_FILES),
        _turn("Read the file plan.txt.", READ_FILE, "plan.txt"),
        _turn(f"Write '{text}' to the file copy.txt.", WRITE_FILE, "copy.txt", text),
        _turn("Read the file copy.txt.", READ_FILE, "copy.txt"),
    )
    return Task(
        (LIST_FILES, READ_FILE, WRITE_FILE), turns, city, delay_s, files={"plan.txt": text, "old.txt": "Nothing."}
    )


def _invoice(rng: random.Random, delay_s: float) -> Task:
    products, many = _products(rng), rng.randint(3, 9)
    name, price, _ = products[0]
    turns = (
        _turn("Read the file order.txt.", READ_FILE, "order.txt"),
        _turn(f"Find the price of the product {name}.", FIND_PRODUCT, name),
        _turn(f"Calculate {many} * {price}.", CALCULATE, f"{many} * {price}"),
        _turn(f"Write '{many * price}' to the file invoice.txt.", WRITE_FILE, "invoice.txt", str(many * price)),
        _turn("Read the file invoice.txt.", READ_FILE, "invoice.txt"),
    )
    files = {"order.txt": f"product: {name}, quantity: {many}"}
    tools = (READ_FILE, WRITE_FILE, FIND_PRODUCT, CALCULATE)
    return Task(tools, turns, many * price, delay_s, {"products": products}, files)


def _contacts(rng: random.Random, delay_s: float) -> Task:
    people, city, phone = _people(rng), rng.choice(CITIES), f"555-{rng.randint(1000, 9999)}"
    (one, *_), (other, *_, number), *_ = people
    turns = (
        _turn(f"In which city does {one} live?", FIND_PERSON, one),
        _turn(f"Add the person Zoe in {city} with the phone {phone}.", ADD_PERSON, "Zoe", city, phone),
        _turn(f"Find the phone of {other}.", FIND_PERSON, other),
    )
    return Task((FIND_PERSON, ADD_PERSON), turns, number, delay_s, {"people": people})


def _shop(rng: random.Random, delay_s: float) -> Task:
    products, price = _products(rng), rng.randint(100, 200)
    (name, *_), (other, cost, _), (third, _, stock), *_ = products
    turns = (
        _turn("How many products are in the database?", QUERY, "SELECT COUNT(*) FROM products", found="5"),
        _turn(
            f"Set the price of the product {name} to {price}.",
            *(UPDATE, f"UPDATE products SET price = {price} WHERE name = '{name}'"),
        ),
        _turn(
            f"What is the price of the product {other}?",
            *(QUERY, f"SELECT price FROM products WHERE name = '{other}'"),
            found=str(cost),
        ),
        _turn(
            f"What is the stock of the product {third}?",
            *(QUERY, f"SELECT stock FROM products WHERE name = '{third}'"),
            found=str(stock),
        ),
    )
    return Task((QUERY, UPDATE), turns, stock, delay_s, {"products": products})


def _readings(rng: random.Random, delay_s: float) -> Task:
    first, second, third = rng.sample(range(11, 90), 3)
    total = first + second + third
    turns = (
        _turn("Read the file readings.txt.", READ_FILE, "readings.txt"),
        _turn("Calculate the sum of these numbers.", CALCULATE, f"{first} + {second} + {third}"),
        _turn(f"Write '{total}' to the file sum.txt.", WRITE_FILE, "sum.txt", str(total)),
        _turn(f"Calculate {total} * 12.", CALCULATE, f"{total} * 12"),
    )
    files = {"readings.txt": f"{first}, {second}, {third}"}
    return Task((READ_FILE, WRITE_FILE, CALCULATE), turns, total * 12, delay_s, files=files)


KINDS = (_stock, _notes, _invoice, _contacts, _shop, _readings)
