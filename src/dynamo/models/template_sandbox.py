"""The sandbox of chat templates: jinja2's immutable one, with bounds of time and size.

`template_rewriting` inserts the operations of this module into a template. `template_bounds` says
what one rendering may use. Filters and methods are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress, islice, repeat
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dynamo.core.errors import ModelUnavailable
from dynamo.models import template_bounds as bounds
from dynamo.models.template_bounds import SMALL_CHARS, RenderBudget
from dynamo.models.template_rewriting import BoundingTransformer, LoopCodeGenerator

MAX_SOURCE_CHARS = 1 << 17
"""Larger templates are refused. Templates of published models have at most 30,000."""
FREE_STEPS = 64
OUTPUT_CHUNK = 32
"""Pieces of output that are joined at a time."""
_new_context: Any = object.__new__
_LAZY_FILTERS = ("batch", "map", "reject", "rejectattr", "select", "selectattr", "slice")
_REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Slow filters that no model uses."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_SIZED = (str, bytes, list, tuple, dict, range)
_TEXT_FILTERS = (
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace"),
    *("string", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount"),
)
"""Filters that make a text of any value."""
_METHODS: dict[str, Callable[[str], str]] = {
    "trim": str.strip, "upper": str.upper, "lower": str.lower, "string": str,
}  # fmt: skip
"""Methods that do the same to plain texts as the filters without arguments."""
_PLAIN_FILTERS = ("attr", "count", "d", "default", "first", "last", "length", "safe")
"""Filters that neither make a larger value nor visit all of a large one."""


class BoundedContext(Context):
    """The variables of one rendering and its budget. Each step takes one of `ticks`."""

    budget: RenderBudget
    ticks: Iterator[bool]

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002 (jinja2's)
        context: Any = super().derived(locals)
        context.budget, context.ticks = self.budget, self.ticks
        return context  # type: ignore[no-any-return]


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates are bounded. Keys of a dict are read without slow checks."""

    concat = staticmethod(bounds.join_captured)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063
        owner = getattr(__function, "__self__", None)
        if owner is not None:
            args = _check_method(__context.budget, __function.__name__, owner, args, kwargs)
        result = super().call(__context, __function, *args, **kwargs)
        return __context.budget.bounded(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None
        text, by_map = str(value.__self__), value.__name__ == "format_map"

        @pass_context
        def bounded_format(context: Any, *args: Any, **kwargs: Any) -> str:
            bounds.check_brace_format(context.budget, text, [*args, *kwargs.values()])
            return format_text(*args) if by_map else format_text(*args, **kwargs)

        return bounded_format


Sandbox.context_class = BoundedContext
Sandbox.code_generator_class = LoopCodeGenerator


class GenerationTag(Extension):
    """Renders the content of `{% generation %}…{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedTemplate:
    """A compiled template. `variables` are the names that every template has."""

    def __init__(self, template: Template) -> None:
        self.variables: Mapping[str, Any] = template.globals
        self._render = template.root_render_func
        fields = BoundedContext(template.environment, {}, None, template.blocks).__dict__
        self._context_class: Any = type("TemplateContext", (BoundedContext,), fields)

    def render(self, variables: dict[str, Any]) -> str:
        """Return the output. Raises `TemplateTooCostly` and whatever the template raises."""
        context = _new_context(self._context_class)  # Context() would set all fields again
        context.parent, context.vars, context.exported_vars = variables, {}, set()
        context.budget = budget = RenderBudget(variables)
        context.ticks = chain(repeat(True, FREE_STEPS), budget)
        pieces = self._render(context)
        chunk = list(islice(pieces, OUTPUT_CHUNK))
        if len(chunk) < OUTPUT_CHUNK:
            return "".join(chunk)
        texts, chars = [], 0
        while chunk:
            texts.append("".join(chunk))
            chars += len(texts[-1])
            budget.check_chars(chars)
            chunk = list(islice(pieces, OUTPUT_CHUNK))
        return "".join(texts)


def compile_template(
    source: str, filters: Mapping[str, Callable[..., Any]], variables: Mapping[str, Any]
) -> BoundedTemplate:
    """Compile a template with further filters and global variables. Raises `ModelUnavailable`."""
    if len(source) > MAX_SOURCE_CHARS:
        raise _invalid_error(f"{len(source)} characters, at most {MAX_SOURCE_CHARS}")
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    for name in ("cycler", "lipsum"):  # no model uses them
        del environment.globals[name]
    for name in _REMOVED_FILTERS:
        del environment.filters[name]
    environment.globals.update(variables, dict=_make_dict, namespace=TemplateNamespace)
    environment.filters.update(filters)
    for name, function in environment.filters.items():
        if name not in _PLAIN_FILTERS:
            environment.filters[name] = _bounded_filter(name, function)
    environment.filters.update(OPERATIONS)
    try:
        tree = BoundingTransformer().visit(environment.parse(source))
        tree.set_environment(environment)
        code = environment.compile(tree)
        template = environment.template_class.from_code(environment, code, environment.globals)
        return BoundedTemplate(template)
    except Exception as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _invalid_error(reason) from error


def _invalid_error(reason: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the model's chat template is invalid: {reason}",
        hint="correct chat_template in tokenizer_config.json, or chat_template.jinja",
    )


class TemplateNamespace(Namespace):
    """A namespace whose text does not contain its values, which may contain each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


@pass_context
def _counted(context: Any, values: Iterable[Any]) -> Iterator[Any]:
    return compress(values, context.ticks)


@pass_context
def _step(context: Any, _: None) -> None:
    next(context.ticks)


@pass_context
def _bounded(context: Any, value: Any) -> Any:
    if isinstance(value, str) and len(value) <= SMALL_CHARS:
        return value
    return context.budget.bounded(value)


@pass_context
def _printed(context: Any, value: Any) -> Any:
    if isinstance(value, str) and len(value) <= SMALL_CHARS:
        return value
    if isinstance(value, list | tuple | dict):
        context.budget.check_tree(value)
    return context.budget.bounded(value)


@pass_context
def _visited(context: Any, value: Any) -> Any:
    if hasattr(value, "__len__") and len(value) > SMALL_CHARS:
        context.budget.check_time()
    return value


@pass_context
def _container(context: Any, value: Any) -> Any:
    parts = value.values() if isinstance(value, dict) else value
    if any(isinstance(part, list | tuple | dict) for part in parts):
        context.budget.check_tree(value)
    return value


@pass_context
def _make_dict(context: Any, *args: Any, **kwargs: Any) -> Any:
    return _container(context, dict(*args, **kwargs))


def _arithmetic(compute: Callable[[RenderBudget, Any, Any], Any]) -> Callable[..., Any]:
    @pass_context
    def operation(context: Any, left: Any, right: Any) -> Any:
        return compute(context.budget, left, right)

    return operation


OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (_counted, _step, _bounded, _printed, _visited, _container)
}
for _compute in (bounds.add, bounds.multiply, bounds.power, bounds.modulo):
    OPERATIONS[f"_{_compute.__name__}"] = _arithmetic(_compute)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with checks before and after it."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    quick = None if wanted else _METHODS.get(name, function)

    @pass_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is str and quick and not (args or kwargs) and len(value) <= SMALL_CHARS:
            return quick(value)
        # Checks before the filter: time, nested values, arguments that make a large result.
        budget: RenderBudget = context.budget
        if not isinstance(value, str) or len(value) > SMALL_CHARS:
            budget.check_time()
            if name in _TEXT_FILTERS and isinstance(value, list | tuple | dict):
                budget.check_tree(value)
        if args or kwargs:
            _check_filter(budget, name, value, [*args, *kwargs.values()])
        # Each item of a joined or filtered list takes a part of the budget.
        if name == "join":
            separator = args[0] if args else kwargs.get("d", "")
            value = bounds.check_join(budget, separator, value)
        elif name in _LAZY_FILTERS and value:
            value = compress(value, context.ticks)
        # The arguments that jinja2 would have put before the value.
        if wanted == "environment":
            args = (value, *args)
            value = context.environment
        elif wanted:
            args = (value, *args)
            value = context if wanted == "context" else context.eval_ctx
        return budget.bounded(function(value, *args, **kwargs))

    return bounded


def _check_filter(budget: RenderBudget, name: str, value: Any, args: list[Any]) -> None:
    """Check the arguments of a filter that may multiply its value."""
    if name == "replace":
        bounds.check_replace(budget, value, *args)
    elif name == "format":
        bounds.check_percent_format(budget, str(value), args)
    elif name in {"batch", "slice", "sum"} and any(isinstance(arg, list | tuple) for arg in args):
        raise TypeError(f"{name} takes no list as an argument")
    elif name not in {"join", "tojson"}:
        bounds.check_arguments(budget, value, args)


def _check_method(
    budget: RenderBudget, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Check a call of a method that may multiply its owner. Returns the arguments."""
    if isinstance(owner, _SIZED) and len(owner) > SMALL_CHARS:
        budget.check_time()
    if not isinstance(owner, str | bytes | int):
        return args
    if name == "replace":
        bounds.check_replace(budget, owner, *args)
    elif name == "join" and args:
        return (bounds.check_join(budget, owner, args[0]),)
    elif name == "translate" and isinstance(owner, str):
        longest = max((len(str(value)) for value in dict(args[0]).values()), default=0)
        budget.check_chars(len(owner) * longest)
    elif args or kwargs:
        bounds.check_arguments(budget, owner, [*args, *kwargs.values()])
    return args
