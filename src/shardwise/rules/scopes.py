"""Who binds which name: imports, assignments, definitions and parameters, scope by scope."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
ScopeNode = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True, slots=True)
class Binding:
    """One place that gives a name its value."""

    node: ast.AST
    """The alias, target, parameter or definition."""
    origin: str = ""
    """Dotted, where the name is imported; relative imports start with a dot."""
    value: ast.expr | None = None
    """What is assigned, where that is one expression."""
    definition: Function | ast.ClassDef | None = None
    """The function or class, where the name is defined."""


@dataclass(slots=True)
class Scope:
    """The names that a module, class, function or lambda binds."""

    node: ast.AST
    parent: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, Scope | None] = field(default_factory=dict)
    """Names declared `global` (their scope) or `nonlocal` (None: look outside)."""
    stars: list[str] = field(default_factory=list)
    """Modules imported by `*`."""

    def bind(self, name: str, binding: Binding) -> None:
        """Add one more place that gives `name` a value."""
        target = self
        while name in target.elsewhere:
            outer = target.elsewhere[name] or target.parent
            if outer is None or outer is target:
                break
            target = outer
        target.names.setdefault(name, []).append(binding)

    def find(self, name: str) -> tuple[Scope, list[Binding]] | None:
        """The scope that binds `name` as seen from here, and all its bindings."""
        scope: Scope | None = self
        while scope is not None:
            # A class body sees its own names; functions inside it do not.
            if name in scope.names and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope, scope.names[name]
            scope = scope.parent
        return None


def read_scopes(tree: ast.Module) -> tuple[dict[ast.AST, Scope], dict[ast.AST, ast.AST]]:
    """The scopes of a module by the node that makes them, and the parent of each node, in source order."""
    reader = _ScopeReader(tree)
    return reader.scopes, reader.parents


class _ScopeReader(ast.NodeVisitor):
    """Reads a module once; afterwards `scopes` has a Scope for each node that makes one."""

    def __init__(self, tree: ast.Module) -> None:
        self._scope = Scope(tree, None)
        self.module = self._scope
        self.scopes: dict[ast.AST, Scope] = {tree: self._scope}
        self.parents: dict[ast.AST, ast.AST] = {}
        for statement in tree.body:
            self.parents[statement] = tree
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the children in source order, remembering whose they are."""
        for child in ast.iter_child_nodes(node):
            self.parents[child] = node
            self.visit(child)

    def _function(self, node: Function) -> None:
        self._scope.bind(node.name, Binding(node, definition=node))
        self._inside(node, [*node.decorator_list, *([node.returns] if node.returns else [])], node.args, node.body)

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside(node, [], node.args, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.bind(node.name, Binding(node, definition=node))
        self._inside(node, [*node.decorator_list, *node.bases, *node.keywords], None, node.body)

    def _inside(
        self, node: ScopeNode, outside: Sequence[ast.AST], parameters: ast.arguments | None, body: Sequence[ast.AST]
    ) -> None:
        for child in outside:
            self.parents[child] = node
            self.visit(child)
        outer, scope = self._scope, Scope(node, self._scope)
        self.scopes[node] = scope
        if parameters is not None:
            self.parents[parameters] = node
            self.generic_visit(parameters)  # defaults and annotations belong to the outer scope
            for parameter in all_parameters(parameters):
                scope.bind(parameter.arg, Binding(parameter))
        self._scope = scope
        for child in body:
            self.parents[child] = node
            self.visit(child)
        self._scope = outer

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.elsewhere.update(dict.fromkeys(node.names, self.module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._scope.elsewhere.update(dict.fromkeys(node.names, None))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.parents[alias] = node
            top = alias.name.split(".")[0]
            self._scope.bind(alias.asname or top, Binding(alias, origin=alias.name if alias.asname else top))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            self.parents[alias] = node
            if alias.name == "*":
                self._scope.stars.append(module)
            else:
                joint = "" if module.endswith(".") else "."
                self._scope.bind(alias.asname or alias.name, Binding(alias, origin=f"{module}{joint}{alias.name}"))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Pair names with values; what cannot be paired is bound to nothing known, in `visit_Name`."""
        if isinstance(target, ast.Name):
            self._scope.bind(target.id, Binding(target, value=value))
            self.scopes.setdefault(target, self._scope)  # so that visit_Name does not bind it again
        elif (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
            and not any(isinstance(e, ast.Starred) for e in [*target.elts, *value.elts])
        ):
            for one, its_value in zip(target.elts, value.elts, strict=True):
                self._assign(one, its_value)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load) and node not in self.scopes:
            self._scope.bind(node.id, Binding(node))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._scope.bind(node.name, Binding(node))
        self.generic_visit(node)


def all_parameters(parameters: ast.arguments) -> list[ast.arg]:
    """Every parameter of a function, in the order of its signature."""
    extra = [one for one in (parameters.vararg, parameters.kwarg) if one is not None]
    return [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, *extra]
