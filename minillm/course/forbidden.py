"""Does an exercise use what it asks one to write? Found in the syntax tree, aliases and helper cells included.

It follows names, not values: ``getattr`` with a computed string or ``exec`` gets past it. The grader protects against
accidents, not against someone who sets out to fool it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator


def parse(source: str) -> list[ast.stmt]:
    """A cell's statements, magics and all; none if it has no valid syntax (running it will say so)."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return ast.parse(TransformerManager().transform_cell(source)).body
    except SyntaxError:
        return []


def bound_names(statement: ast.stmt) -> set[str]:
    """Names that a statement gives a meaning to; of ``Pool.free = f`` that is ``Pool``."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Name) and isinstance(node.ctx, ast.Store):
            while isinstance(node, ast.Attribute | ast.Subscript):
                node = node.value
            names |= {node.id} if isinstance(node, ast.Name) else set()
    return names


def forbidden_use(forbid: list[str], cell: str, names: set[str], others: list[str], given: list[str]) -> str | None:
    """The first forbidden name in use, written in full, or None.

    ``forbid`` lists dotted names: functions, or modules, which forbids all that is in them; a name without a dot
    forbids any attribute or import of that name. Searched are the exercise's ``cell`` and whatever it leads to in
    ``others``, the learner's further cells: statements that bind one of the exercise's ``names`` or a name used.
    Of the cells that were ``given`` with the lab, only what they import counts: their code is not the learner's.
    """
    queue = parse(cell)
    elsewhere = [statement for source in others for statement in parse(source)]
    imports = [s for source in given for s in parse(source) if isinstance(s, ast.Import | ast.ImportFrom)]
    aliases = _aliases(imports + queue + elsewhere)
    # An import in another cell is no use yet; the names it binds are resolved where they are used.
    elsewhere = [s for s in elsewhere if not isinstance(s, ast.Import | ast.ImportFrom)]
    own = {name for s in queue + elsewhere if not isinstance(s, ast.Import | ast.ImportFrom) for name in bound_names(s)}
    wanted = set(names)
    used = [aliases[name] for name in names - own if name in aliases]  # the exercise's own name is but an import
    while True:
        for name in used:
            if any(_matches(name, entry, own) for entry in forbid):
                return name
        queue += [s for s in elsewhere if bound_names(s) & wanted]
        elsewhere = [s for s in elsewhere if not bound_names(s) & wanted]
        if not queue:
            return None
        statement = queue.pop(0)
        used = list(_uses(statement, aliases))
        wanted |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _aliases(statements: list[ast.stmt]) -> dict[str, str]:
    """What each imported name stands for: {"F": "torch.nn.functional"}; so does ``F = torch.nn.functional``."""
    aliases: dict[str, str] = {}
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Assign) and (dotted := _dotted(node.value)):
                aliases |= {t.id: _resolve(dotted, aliases) for t in node.targets if isinstance(t, ast.Name)}
    return aliases


def _dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as text; ``f(x).b`` as ``?.b``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value) or '?'}.{node.attr}"
    return None


def _resolve(dotted: str, aliases: dict[str, str]) -> str:
    root, dot, rest = dotted.partition(".")
    return aliases.get(root, root) + dot + rest


def _uses(statement: ast.stmt, aliases: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            yield _resolve(_dotted(node), aliases)


def _matches(name: str, entry: str, own: set[str]) -> bool:
    """Whether a use falls under an entry of the list; the package's name for it may be a re-export."""
    root, last = name.split(".")[0], name.split(".")[-1]
    if "." not in entry:
        return (last == entry or root == entry) and name not in own
    star = name.endswith(".*") and entry.startswith(name[:-1])
    within = name == entry or name.startswith(entry + ".")
    return star or within or (root == entry.split(".")[0] and last == entry.split(".")[-1])
