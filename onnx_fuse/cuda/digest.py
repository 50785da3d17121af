"""A digest of the code that a kernel's macros reach: the same where the compiled code is.

A tuning record holds as long as its kernel does what it did. The whole text of a source is no
measure of that, since a line in a header changes it for every kernel; the compiled code is none
either, since another compiler makes another of the same text. So this takes from the expanded text
what the entry point reaches under these macros: macros are put in their places, branches whose
condition is then a number are decided, and declarations that nothing reached names are left out.
Comments, white space and all that is left out may change. What is not understood stays as it
stands, so that a change of the compiled code is always one of the digest.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from onnx_fuse.cuda.constants import evaluate
from onnx_fuse.cuda.source import Defines, source_text

_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|\.?\d(?:[eE][+-]|[\w.])*|\w+|<<=|>>=|<<|>>|::|->|\+\+|--'
    r"|&&|\|\||[=!<>+\-*/%&|^]=|\S"
)
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPENS, _CLOSES = ("(", "{", "["), (")", "}", "]")
_TYPES = {"int", "bool", "unsigned", "u32", "u64", "i64", "float", "auto", "class", "typename"}
_AGGREGATES = ("struct", "class", "union", "enum")
_MODIFIERS = {"__launch_bounds__", "alignas", "__align__", "decltype", "sizeof"}
Table = Mapping[str, Sequence[str]]
"""Tokens by name: of macros without parameters, of constants."""


@lru_cache(1024)
def code_digest(source: str, entry: str, defines: Defines) -> str:
    """12 hex digits over what of a source `entry` reaches under these macros."""
    text = "\n".join(" ".join(item) for item in reachable(source_text(source), entry, defines))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def reachable(text: str, entry: str, defines: Defines) -> list[list[str]]:
    """The declarations that a kernel reaches, as tokens, in their order."""
    code, functions = _preprocessed(text, defines)
    calls = {name for name, _ in functions}
    items = [item for item in _declarations(code, calls) if item[0] != "static_assert"]
    constants = _constants(items, code)
    named = [
        (names, _folded(_with(item, constants, frozenset(names)), calls))
        for item, names in zip(items, map(_names, items), strict=True)
    ]
    named += [({name}, _with(body, constants)) for name, body in functions]
    reached, used, grows = {entry}, [False] * len(named), True
    while grows:
        grows = False
        for i, (names, item) in enumerate(named):
            if not used[i] and (not names or names & reached):
                used[i] = grows = True
                reached.update(name for token in item for name in _NAME.findall(token))
    return [item for (_, item), keep in zip(named, used, strict=True) if keep]


# ---- macros -------------------------------------------------------------------------------------


def _preprocessed(text: str, defines: Defines) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Tokens with macros in their places, and the macros with parameters, which stay as they are.

    A condition on what only the compiler knows (__CUDA_ARCH__) stays, as a token, with all that it
    chooses from.
    """
    head = "".join(f"#define {name} {value}\n" for name, value in defines)
    text = _COMMENT.sub(lambda m: m[1] or " ", head + text).replace("\\\n", " ")
    macros: dict[str, list[str]] = {}
    functions: dict[str, list[str]] = {}
    code: list[str] = []
    states: list[bool | None] = []  # of the conditions around: holds, holds not, not known
    chosen: list[bool] = []
    for line in text.splitlines():
        tokens = _TOKEN.findall(line)
        if not tokens or tokens[0] != "#":
            if False not in states:
                code += _with(tokens, macros)
            continue
        kind = tokens[1] if len(tokens) > 1 else ""
        outside = False in states[:-1]
        if kind in ("if", "ifdef", "ifndef"):
            states.append(_holds(kind, tokens[2:], macros, functions))
            chosen.append(states[-1] is True)
        elif kind in ("elif", "else"):
            holds = True if kind == "else" else _holds("if", tokens[2:], macros, functions)
            states[-1] = False if chosen[-1] else None if states[-1] is None else holds
            chosen[-1] = chosen[-1] or states[-1] is True
        elif kind == "endif":
            if states.pop() is None and False not in states:
                code.append("#endif")
            chosen.pop()
            continue
        elif False in states or tokens[1:] == ["pragma", "once"]:
            continue
        elif kind == "define" and line.split(tokens[2], 1)[1][:1] == "(":
            functions[tokens[2]] = tokens
        elif kind == "define" and None not in states:
            macros[tokens[2]] = tokens[3:]
        elif kind == "undef":
            macros.pop(tokens[2], None)
        else:
            code.append(" ".join(_with(tokens, macros)))
        if kind in ("if", "ifdef", "ifndef", "elif", "else") and states[-1] is None and not outside:
            code.append(" ".join(tokens))
    return code, [(name, _with(body, macros)) for name, body in functions.items()]


def _with(tokens: Sequence[str], table: Table, hidden: frozenset[str] = frozenset()) -> list[str]:
    """The tokens with the names of `table` replaced; members of such a name stay."""
    expanded: list[str] = []
    for i, token in enumerate(tokens):
        member = i > 0 and tokens[i - 1] in (".", "->", "::")
        if token in table and token not in hidden and not member:
            expanded += _with(table[token], table, hidden | {token})
        else:
            expanded.append(token)
    return expanded


def _holds(
    kind: str, tokens: Sequence[str], macros: Table, functions: Mapping[str, object]
) -> bool | None:
    """Whether the condition of an #if holds; None where only the compiler can tell."""
    if kind != "if":
        if tokens[0].startswith("__"):
            return None
        return (tokens[0] in macros or tokens[0] in functions) == (kind == "ifdef")
    text = re.sub(
        r"defined \(? ?(\w+)(?: \))?",
        lambda m: str(int(m[1] in macros or m[1] in functions)),
        " ".join(tokens),
    )
    replaced = [
        "0" if _NAME.fullmatch(t) and not t.startswith("__") else t
        for t in _with(text.split(" "), macros)
    ]
    value = evaluate(replaced)
    return None if value is None else bool(value)


# ---- declarations -------------------------------------------------------------------------------


def _declarations(code: Sequence[str], calls: Collection[str]) -> Iterator[list[str]]:
    """The declarations of a file, up to `;` or the end of the body; up to `)` if it is a macro."""
    item: list[str] = []
    depth = 0
    for token in code:
        if token.startswith("#") and not item:
            yield [token]
            continue
        item.append(token)
        depth += (token in _OPENS) - (token in _CLOSES)
        ends = token == ";" or (token == "}" and _is_function(item))
        if not depth and (ends or (token == ")" and item[0] in calls)):
            if item != [";"]:
                yield item
            item = []
    if item:
        yield item


def _is_function(item: Sequence[str]) -> bool:
    head = _untemplated(item[: item.index("{")])
    return "(" in head and "=" not in head and head[0] not in _AGGREGATES


def _untemplated(item: Sequence[str]) -> Sequence[str]:
    while item[0] == "template":
        item = item[_angles(item, 1) :]
    return item


def _names(item: Sequence[str]) -> set[str]:
    """The names that a declaration defines; none where that is not clear: it is then kept."""
    if item[0].startswith("#"):
        return {item[0].split(" ")[2]} if item[0].startswith("# define") else set()
    rest = _untemplated(item)
    if rest[0] in _AGGREGATES:
        at = 1 if rest[1] not in _MODIFIERS else _closing(rest, 2)
        inner = {t for t in rest if _NAME.fullmatch(t)} if rest[0] == "enum" else set()
        return {rest[at], *inner} if _NAME.fullmatch(rest[at]) else inner
    if rest[0] == "typedef":
        return {next(t for t in reversed(rest) if _NAME.fullmatch(t))}
    if rest[0] == "using":
        return {rest[1]}
    if "operator" in rest or rest[-1] == ")":
        return set()
    names, i = set(), 0
    while i < len(rest):
        token, after = rest[i], rest[i + 1] if i + 1 < len(rest) else ""
        if token in _MODIFIERS:
            i = _closing(rest, i + 1)
            continue
        if _NAME.fullmatch(token):
            end = _angles(rest, i + 1) if after == "<" else i + 1
            after = rest[end] if end < len(rest) else ""
            if after == "(":
                return {token}
            if after in ("=", ";", "[", ",", "{"):
                names.add(token)
        if token == "=" or token in _OPENS:  # up to the next declarator
            depth = 0
            while i < len(rest) and (depth or rest[i] not in (",", ";")):
                depth += (rest[i] in _OPENS) - (rest[i] in _CLOSES)
                i += 1
        i += 1
    return names


def _closing(tokens: Sequence[str], start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] in _OPENS) - (tokens[i] in _CLOSES)
        if not depth:
            return i + 1
    return len(tokens)


def _angles(tokens: Sequence[str], start: int) -> int:
    """The index after the `>` that closes the `<` at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] == "<") - (tokens[i] == ">") - 2 * (tokens[i] == ">>")
        if depth <= 0:
            return i + 1
    return len(tokens)


def _constants(items: Sequence[Sequence[str]], code: Sequence[str]) -> dict[str, list[str]]:
    """Constants of the file that are numbers; not those whose name stands for another thing too."""
    declared = Counter(b for a, b in pairwise(code) if a in _TYPES)
    constants: dict[str, list[str]] = {}
    for item in items:
        if item[0] != "constexpr" or item[1] not in _TYPES or "(" in item[:3]:
            continue
        start = 2
        while start < len(item) and item[start + 1 : start + 2] == ["="]:
            end, depth = start + 2, 0
            while depth or item[end] not in (",", ";"):
                depth += (item[end] in _OPENS) - (item[end] in _CLOSES)
                end += 1
            value = evaluate(_with(item[start + 2 : end], constants))
            if value is not None and declared[item[start]] <= 1:
                constants[item[start]] = [str(value)]
            start = end + 1
    return constants


# ---- branches -----------------------------------------------------------------------------------


def _folded(tokens: Sequence[str], calls: Collection[str]) -> list[str]:
    """The tokens without branches whose condition is a number; `calls` are macros."""
    folded: list[str] = []
    i = 0
    while i < len(tokens):
        if tokens[i] != "if":
            folded.append(tokens[i])
            i += 1
            continue
        start = i + 1 + (tokens[i + 1] == "constexpr")
        behind = _closing(tokens, start)
        value = evaluate(tokens[start + 1 : behind - 1])
        if value is None:
            folded += tokens[i:behind]
            i = behind
            continue
        end = _statement(tokens, behind, calls)
        chosen = tokens[behind:end] if value else []
        if tokens[end : end + 1] == ["else"]:
            other, end = end + 1, _statement(tokens, end + 1, calls)
            chosen = chosen if value else tokens[other:end]
        # what an if, for or else governs must stay a statement
        folded += _folded(chosen, calls) or [";"] * (folded[-1:] in ([")"], ["else"], ["do"]))
        i = end
    return folded


def _statement(tokens: Sequence[str], start: int, calls: Collection[str]) -> int:
    """The index after the statement at `start`; a statement that is a macro may end without `;`."""
    i = start
    while tokens[i].startswith("#"):
        i += 1
    if tokens[i] == "{":
        return _closing(tokens, i)
    if tokens[i] == "if":
        i = _statement(tokens, _closing(tokens, i + 1 + (tokens[i + 1] == "constexpr")), calls)
        return _statement(tokens, i + 1, calls) if tokens[i : i + 1] == ["else"] else i
    if tokens[i] in ("for", "while", "switch"):
        return _statement(tokens, _closing(tokens, i + 1), calls)
    if tokens[i] == "do":
        i = _statement(tokens, i + 1, calls)
    elif tokens[i] in calls and tokens[i + 1] == "(":
        behind = _closing(tokens, i + 1)
        if tokens[behind] == "}" or _NAME.fullmatch(tokens[behind]):
            return behind
    depth = 0
    while depth or tokens[i] != ";":
        depth += (tokens[i] in _OPENS) - (tokens[i] in _CLOSES)
        i += 1
    return i + 1
