"""Measure the code house: its size, its names and its English, from syntax trees.

    python tests/house.py          print the table as it is now (to keep it: > tests/house.toml)
    python tests/house.py NAME     list every place that a measure, or a room's dialect, counts

A room is a package's folder, as `shoal/core`, or the package itself for files at its top. Each
measure returns the places it counts, one line each, so that a number always has its list.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

SOURCE = Path(__file__).parents[1] / "src"

MOST_ATTRIBUTES = 15
SMALL_FILE = 60  # a file with fewer lines is small
IRREGULAR = re.compile(
    "begun|bought|brought|built|caught|chosen|dealt|done|drawn|fed|felt|found|given|gone|held|heard|"
    "kept|known|laid|lost|made|meant|met|paid|said|seen|sent|shown|spent|taken|taught|thought|"
    "thrown|told|unsent|won|written"
)
NO_PARTICIPLES = ("need", "feed", "seed", "speed", "bed", "red", "reed", "embed", "shed")
ADVERBS = ("again", "ahead", "alone", "around", "aside", "elsewhere", "inside", "outside", "apart")
REMOTE_ROOMS = ("shoal/remote", "shoal/servers")  # the way to other hosts, both sides

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Prose:
    """A docstring or a comment, and the line where it begins."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """Say where it stands, and its first line."""
        first, *_ = self.text.strip().splitlines()
        return f"{self.path}:{self.line} {first}"


@dataclass(frozen=True)
class SourceFile:
    """One Python file: its path under src/, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> list[Prose]:
        """Comments; lines below each other in the same column are one. Directives are left out."""
        return list(_read_comments(self))

    @cached_property
    def docstrings(self) -> list[Prose]:
        """Docstrings of functions and classes."""
        return list(_read_docstrings(self.path, self.nodes[1:]))

    @property
    def prose(self) -> list[Prose]:
        """All docstrings, including the module's, and all comments."""
        return [*_read_docstrings(self.path, [self.tree]), *self.docstrings, *self.comments]

    @property
    def module(self) -> str:
        """Dotted name, where a package's `__init__.py` is the package itself."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """Package and first folder, or the package for a file at its top."""
        return "/".join(PurePosixPath(self.path).parts[:-1][:2])


@dataclass(frozen=True)
class Found:
    """Places that break a rule, and the number of places where it applies."""

    places: tuple[str, ...]
    total: int


@dataclass(frozen=True)
class Measure:
    """A measure of the whole house, and the usual cure."""

    find: Callable[[Sequence[SourceFile]], list[str]]
    cure: str


def parse(path: str, text: str) -> SourceFile:
    """Parse a file's text."""
    return SourceFile(path, text, ast.parse(text))


def read_files(root: Path = SOURCE) -> list[SourceFile]:
    """Read every Python file of every package under a folder."""
    paths = sorted(root.rglob("*.py"))
    return [parse(path.relative_to(root).as_posix(), path.read_text()) for path in paths]


def find_wide_classes(files: Iterable[SourceFile]) -> list[str]:
    """List classes with more than 15 attributes."""
    return [
        f"{file.path}:{node.lineno} {node.name}: {number}"
        for file in files
        for node in file.nodes
        if isinstance(node, ast.ClassDef) and (number := len(attributes(node))) > MOST_ATTRIBUTES
    ]


def attributes(node: ast.ClassDef) -> set[str]:
    """Collect a class's own attributes: annotated names in its body, and stores to `self`.

    Annotations count in every class, since not only dataclasses make fields of them. `ClassVar`,
    `InitVar` and `KW_ONLY` are no fields. Inherited attributes are not counted.
    """
    fields = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not re.search(r"\b(ClassVar|InitVar|KW_ONLY)\b", ast.unparse(statement.annotation))
    }
    stores = {
        inner.attr
        for inner in _walk_without_inner_classes(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    return fields | stores


def _walk_without_inner_classes(node: ast.ClassDef) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        if not isinstance(inner, ast.ClassDef):
            yield inner
            waiting.extend(ast.iter_child_nodes(inner))


def find_functions(
    files: Iterable[SourceFile], count: Callable[[Function], int], most: int
) -> list[str]:
    """List functions whose count of something is above a limit."""
    return [
        f"{file.path}:{node.lineno} {node.name}: {number}"
        for file in files
        for node in file.nodes
        if isinstance(node, Function) and (number := count(node)) > most
    ]


def count_lines(node: Function) -> int:
    """Count lines from `def` to the last one, without decorators and the docstring."""
    lines = _last_line(node) - node.lineno + 1
    docstring = _docstring(node)
    return lines if docstring is None else lines - (_last_line(docstring) - docstring.lineno + 1)


def count_parameters(node: Function) -> int:
    """Count named parameters: positional and keyword-only ones.

    `self` or `cls` in first place, `*args` and `**kwargs` are not counted.
    """
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    is_method = names[:1] in (["self"], ["cls"])
    return len(names) + len(node.args.kwonlyargs) - is_method


def _last_line(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _docstring(node: ast.AST) -> ast.Constant | None:
    if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return first.value if isinstance(first.value.value, str) else None
    return None


def find_shared_class_names(files: Iterable[SourceFile]) -> list[str]:
    """List class names that stand in two or more files.

    A leading underscore is not part of the name: `_Rows` and `Rows` are the same word.
    """
    paths = defaultdict[str, set[str]](set)
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                paths[node.name.lstrip("_")].add(file.path)
    return [f"{name}: {', '.join(sorted(at))}" for name, at in sorted(paths.items()) if len(at) > 1]


def find_crumbs(files: Sequence[SourceFile]) -> list[str]:
    """List files under 60 lines that exactly one other file imports.

    A file that defines a registered class is no crumb, as a codec is a file by design. Nor is an
    `__init__.py` or `__main__.py`.
    """
    importers = map_importers(files)
    kept = find_registered(files)
    return [
        f"{file.path}: {lines} lines, imported by {next(iter(importers[file.path]))}"
        for file in files
        if (lines := len(file.text.splitlines())) < SMALL_FILE
        and len(importers[file.path]) == 1
        and file.path not in kept
        and PurePosixPath(file.path).name not in ("__init__.py", "__main__.py")
    ]


def map_importers(files: Sequence[SourceFile]) -> dict[str, set[str]]:
    """Map each file to the other files that import it.

    `from shoal import core` imports shoal/core where that is a module. Importing a module does not
    count as importing the packages around it.
    """
    paths = {file.module: file.path for file in files}
    importers: dict[str, set[str]] = {file.path: set() for file in files}
    for file in files:
        for target in _imported_names(file).values():
            module = target if target in paths else target.rpartition(".")[0]
            if module in paths and paths[module] != file.path:
                importers[paths[module]].add(file.path)
    return importers


def find_registered(files: Sequence[SourceFile]) -> set[str]:
    """Find the files that define a class which the registry offers by name.

    A contract is a subclass of `Contract` that names its `package`. A registered class stands in a
    file of that package, descends from the contract, and has a `name`.
    """
    by_module = {file.module: file for file in files}
    found = set()
    for file in files:
        for node in _top_classes(file):
            names = _assigned_strings(node)
            for contract in _ancestors(f"{file.module}.{node.name}", by_module):
                package = _assigned_strings(contract).get("package")
                if "name" in names and package == file.module.rpartition(".")[0]:
                    found.add(file.path)
    return found


def _ancestors(name: str, by_module: Mapping[str, SourceFile]) -> Iterator[ast.ClassDef]:
    """Yield the contracts among a class's ancestors, found through the imports of each file."""
    module, _, local = name.rpartition(".")
    file = by_module.get(module)
    if file is None:
        return
    classes = {node.name: node for node in _top_classes(file)}
    imported = _imported_names(file)
    if local not in classes:  # a package may pass on a class that it imports
        if local in imported:
            yield from _ancestors(imported[local], by_module)
        return
    for base in classes[local].bases:
        first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        above = f"{module}.{first}" if first in classes else imported.get(first, first)
        above += f".{rest}" if rest else ""
        if above.rpartition(".")[2] == "Contract":
            yield classes[local]
        yield from _ancestors(above, by_module)


def is_participle(name: str) -> bool:
    """Say whether a name ends in a participle: it names a result, and no thing and no act."""
    last = name.strip("_").rpartition("_")[2]
    return bool(IRREGULAR.fullmatch(last)) or (last.endswith("ed") and last not in NO_PARTICIPLES)


def find_files_named_by_participles(files: Iterable[SourceFile]) -> list[str]:
    """List files named by a participle, an adverb or a preposition, such as `spent` or `aside`."""
    return [f.path for f in files if is_participle(s := PurePosixPath(f.path).stem) or s in ADVERBS]


def find_functions_named_by_participles(files: Iterable[SourceFile]) -> list[str]:
    """List functions, but no properties, named by a participle, such as `mended`."""
    return [
        f"{file.path}:{node.lineno} {node.name}"
        for file in files
        for node in file.nodes
        if isinstance(node, Function)
        and is_participle(node.name)
        and not any("property" in ast.unparse(each) for each in node.decorator_list)
    ]


def find_message_classes(files: Iterable[SourceFile]) -> list[str]:
    """List classes that may cross to another host by themselves: all that descend from Message."""
    classes = {node.name: (file, node) for file in files for node in _top_classes(file)}

    def crosses(name: str) -> bool:
        bases = [ast.unparse(base) for base in classes[name][1].bases] if name in classes else []
        return any(base == "Message" or crosses(base) for base in bases)

    return [f"{file.path}:{node.lineno} {n}" for n, (file, node) in classes.items() if crosses(n)]


def find_remote_hundreds(files: Iterable[SourceFile]) -> list[str]:
    """List every hundredth line of the rooms that speak with other hosts, so hundreds of lines."""
    inside = [file for file in files if file.room in REMOTE_ROOMS]
    lines = [f"{f.path}:{i + 1}" for f in inside for i in range(len(f.text.splitlines()))]
    return lines[99::100]


def _top_classes(file: SourceFile) -> list[ast.ClassDef]:
    return [node for node in file.tree.body if isinstance(node, ast.ClassDef)]


def _assigned_strings(node: ast.ClassDef) -> dict[str, str]:
    """Map the names that a class's body sets to a string."""
    strings = {}
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                strings[name] = text
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                strings[name] = text
    return strings


def _imported_names(file: SourceFile) -> dict[str, str]:
    """Map each name that a file imports, anywhere in it, to its full dotted name."""
    names: dict[str, str] = {}
    for node in file.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = _full_module(file, node)
            names |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
    return names


def _full_module(file: SourceFile, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    folders = PurePosixPath(file.path).parts[:-1]
    parts = [*folders[: len(folders) - node.level + 1], *([node.module] if node.module else [])]
    return ".".join(parts)


RARE_WORDS = re.compile(r"\b(what|who|whose|those)\b", re.IGNORECASE)
FUNCTION_WORDS = re.compile(  # in front of a comment, after its number if it has one
    r"[^A-Za-z`]*(of|that|whose|which|what|with|by|to|as|for|from|in|at|on|where|those|who|nobody"
    r"|behind|beside)\b",
    re.IGNORECASE,
)
PHRASES = re.compile(  # that open a noun phrase without its noun
    r"(What|Of|Those|As|The same|Where|Whose|Who|Which|That|How|With|By|In|For|From|To|At|On)\b"
)
DIRECTIVES = re.compile(r"(type|pragma|fmt|ruff|mypy):|noqa")
# shares that every room should reach, and that hold for a room outside the table
AIMS = {"words": 0.002, "comments": 0.05, "openings": 0.05}


def measure_dialect(files: Iterable[SourceFile]) -> dict[str, dict[str, Found]]:
    """Measure the dialect of each room: its words, its comments and its docstrings' openings."""
    rooms = defaultdict[str, list[SourceFile]](list)
    for file in files:
        rooms[file.room].append(file)
    return {
        room: {
            "words": find_rare_words(inside),
            "comments": find_bare_comments(inside),
            "openings": find_phrases(inside),
        }
        for room, inside in sorted(rooms.items())
    }


def find_rare_words(files: Iterable[SourceFile]) -> Found:
    """Find what, who, whose and those among the words of docstrings and comments."""
    places, total = [], 0
    for file in files:
        for prose in file.prose:
            for offset, line in enumerate(_without_code(prose.text).splitlines()):
                total += len(re.findall(r"[A-Za-z]+", line))
                where = f"{prose.path}:{prose.line + offset}"
                places += [f"{where} {line.strip()}"] * len(RARE_WORDS.findall(line))
    return Found(tuple(places), total)


def find_bare_comments(files: Iterable[SourceFile]) -> Found:
    """Find comments that begin with a function word, after any number in front."""
    found = [
        prose for file in files for prose in file.comments if re.search("[A-Za-z]", prose.text)
    ]
    bare = [prose for prose in found if FUNCTION_WORDS.match(prose.text)]
    return Found(tuple(map(str, bare)), len(found))


def find_phrases(files: Iterable[SourceFile]) -> Found:
    """Find docstrings of functions and classes that open with a noun phrase without a noun."""
    found = [prose for file in files for prose in file.docstrings]
    phrases = [prose for prose in found if PHRASES.match(prose.text.lstrip())]
    return Found(tuple(map(str, phrases)), len(found))


def _read_docstrings(path: str, nodes: Iterable[ast.AST]) -> Iterator[Prose]:
    for node in nodes:
        docstring = _docstring(node)
        if docstring is not None:
            yield Prose(path, docstring.lineno, str(docstring.value))


def _read_comments(file: SourceFile) -> Iterator[Prose]:
    lines: list[str] = []
    start = end = (0, 0)  # line and column where the last comment begins, and its last line's
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        stands_alone = token.line.strip().startswith("#")
        if not (lines and stands_alone and token.start == (end[0] + 1, end[1])):
            if lines:
                yield Prose(file.path, start[0], "\n".join(lines))
            lines, start = [], token.start
        end = token.start
        lines.append("" if DIRECTIVES.match(text) else text)
    if lines:
        yield Prose(file.path, start[0], "\n".join(lines))


def _without_code(text: str) -> str:
    """Leave out examples and code in backquotes, but keep the number of lines."""
    lines = ["" if re.match(r"\s*(>>>|\.\.\.)", line) else line for line in text.splitlines()]
    return re.sub(r"`[^`]*`", lambda code: "code" + "\n" * code[0].count("\n"), "\n".join(lines))


def allowed(kind: str, found: Found) -> int:
    """Return how many places the aim allows in a room: one always, so that few rows are fair."""
    return max(1, int(AIMS[kind] * found.total))


MEASURES = {
    "classes_over_15_attributes": Measure(
        find_wide_classes, "Move attributes that change together into a class of their own."
    ),
    "functions_over_60_lines": Measure(
        partial(find_functions, count=count_lines, most=60), "Split the function by its paragraphs."
    ),
    "functions_over_40_lines": Measure(
        partial(find_functions, count=count_lines, most=40), "Split the function by its paragraphs."
    ),
    "functions_over_7_parameters": Measure(
        partial(find_functions, count=count_parameters, most=7),
        "Pass parameters that always travel together as one frozen dataclass.",
    ),
    "class_names_in_two_files": Measure(
        find_shared_class_names, "Give the new class a name that no other file uses."
    ),
    "small_files_with_one_importer": Measure(
        find_crumbs, "Merge the small file into the file that imports it."
    ),
    "files_named_by_participles": Measure(
        find_files_named_by_participles, "Name the file by the thing that it is about."
    ),
    "functions_named_by_participles": Measure(
        find_functions_named_by_participles, "Name the function by what it does: a verb."
    ),
    "message_classes": Measure(
        find_message_classes, "Say it with a verb of remote/verbs.py that is there already."
    ),
    "hundreds_of_remote_lines": Measure(
        find_remote_hundreds, "Take away as many lines as you add, or show why they are needed."
    ),
}

HEADER = """\
# The house today. tests/test_house.py lets these numbers fall and never rise.
# Print the table as it is now: python tests/house.py
# List the places behind a number: python tests/house.py functions_over_60_lines
#                              or: python tests/house.py shoal/core
"""
DIALECT_HEADER = """\
# By room, the number of
#   words     "what", "who", "whose" and "those" in docstrings and comments (aim: 2 in 1,000 words)
#   comments  that begin with a function word such as "of" or "that" (aim: 5 in 100)
#   openings  docstrings of functions and classes that begin with "What", "Of" ... (aim: 5 in 100)
# A number stands here only while it is above the aim. Anything else is held to the aim.
"""


def debts(found: Mapping[str, Found]) -> dict[str, int]:
    """Return a room's numbers that are above their aims."""
    return {
        kind: len(inside.places)
        for kind, inside in found.items()
        if len(inside.places) > allowed(kind, inside)
    }


def room_line(room: str, numbers: Mapping[str, int]) -> str:
    """Write a room's line of the table."""
    return f'"{room}" = {{ ' + ", ".join(f"{kind} = {n}" for kind, n in numbers.items()) + " }"


def table(files: Sequence[SourceFile]) -> str:
    """Write the whole table."""
    lines = [HEADER, "[house]"]
    lines += [f"{name} = {len(measure.find(files))}" for name, measure in MEASURES.items()]
    lines += ["", DIALECT_HEADER + "[dialect]"]
    for room, found in measure_dialect(files).items():
        if numbers := debts(found):
            lines.append(room_line(room, numbers))
    return "\n".join(lines)


def places(name: str, files: Sequence[SourceFile]) -> str:
    """List the places behind a measure's number, or behind a room's dialect."""
    if name in MEASURES:
        found = MEASURES[name].find(files)
        return "\n".join([f"{name} = {len(found)}", *found])
    inside = [file for file in files if file.room == name]
    if not inside:
        return f"{name} is neither a room nor one of {', '.join(MEASURES)}"
    lines = []
    for kind, one in measure_dialect(inside)[name].items():
        lines += [f"{kind}: {len(one.places)} in {one.total}, aim {allowed(kind, one)}"]
        lines += [f"  {place}" for place in one.places]
    return "\n".join(lines)


if __name__ == "__main__":
    house = read_files()
    print("\n\n".join(places(name, house) for name in sys.argv[1:]) or table(house))
