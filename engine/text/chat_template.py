"""Chat messages to text, by the model's own template, and which parts of the text are whose.

What a message holds is written by others and is text, whatever it looks like; what the template
itself writes may be control tokens. A template is a program that may trim, split and escape what
it is given, so it is not given the strings themselves: each is a `_Foreign`, which acts like the
string and is written out as one private-use character. What is rendered is the template's own
writing with such a character where each string stands; the strings are put in last.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidParamsError
from ..prompt import check_text

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["ChatTemplate", "Rendered", "content_text"]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that templates and clients have for what a model thought before it answered."""

_MAX_OWN_CHARACTERS = 4 * 2**20
"""Most characters that a template itself may write."""
_MAX_RANGE_ITEMS = 1_000_000
"""Most items that all of a rendering's ranges may have together."""
_MAX_OPERAND = 2**20
"""Most characters, items or bits that `*` and `**` may make."""

# Planes 15 and 16: in no tokenizer's control tokens, and left alone by Unicode normalization.
_FIRST, _NUM = 0xF0000, 0xFFFE
_PLACEHOLDER = re.compile("[\U000f0000-\U0010ffff]")
_NOT_ASCII = re.compile("[^\x00-\x7f\U000f0000-\U0010ffff]")
_WORD = re.compile(r"[\w-]*", re.ASCII)


class Rendered(NamedTuple):
    """A text, and which of its characters the template did not write."""

    text: str
    plain: tuple[tuple[int, int], ...]
    """Ranges of `text`, (start, end), in order and apart from each other."""


def content_text(name: str, content: object) -> str:
    """Text of a message's content: a string, or a list of text parts, which are joined by newlines.

    :param name: of the field, for errors, like "messages[3].content".
    :raises InvalidParamsError: if it is neither, or a part is something else than text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidParamsError(name, content, "a string, or a list of text parts")
    return "\n".join(_part_text(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part_text(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidParamsError(name, part, 'a part like {"type": "text", "text": "..."}')
    if part.get("type") != "text":
        raise InvalidParamsError(
            f"{name}.type", part.get("type"), "'text'; images, sound and files are not understood"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParamsError(f"{name}.text", text, "a string")
    return text


class ChatTemplate:
    """A model's chat template. Thread-safe.

    Rendering is bounded by what the template writes, by the items of its ranges and by what its
    multiplications make. A template is still a program of the model's, and within these bounds it
    takes the time that it takes.

    :param source: `source(chat_template, tools)` is the Jinja source to use.
    :param variables: what a template may write besides the messages, like `bos_token`.
    :param has_word_tokens: whether a control token may look like a single word.
    """

    def __init__(
        self,
        source: Callable[[str | None, Any], str],
        variables: Mapping[str, Any],
        *,
        has_word_tokens: bool = False,
    ) -> None:
        self._source = source
        self._variables = variables
        self._has_word_tokens = has_word_tokens
        self._compile = functools.lru_cache(maxsize=8)(_compile)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Any = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> Rendered:
        """The messages as text.

        :param add_generation_prompt: end with the opening of the assistant's turn.
        :param tools: JSON schemas, or functions that are described by their docstrings.
        :param chat_template: source, or name, of another template than the model's own.
        :param kwargs: what else the template understands.
        :raises InvalidParamsError: if a message is malformed, or the template refuses them.
        """
        strings = _Strings(wrap_words=self._has_word_tokens)
        try:
            source = self._source(chat_template, tools)
            variables = {
                **self._variables,
                "documents": None,
                **{name: strings.wrap(value, name) for name, value in kwargs.items()},
                "tools": strings.wrap(_schemas(tools), "tools"),
                "messages": _checked(messages, strings, source),
                "add_generation_prompt": add_generation_prompt,
                "range": _ranges(),
            }
            own = _joined(self._compile(source).generate(**variables))
        except InvalidParamsError:
            raise
        except Exception as error:  # it is a program, and may raise anything
            raise InvalidParamsError(
                "messages",
                messages,
                f"the chat template refused them: {type(error).__name__}: {error}",
            ) from error
        return strings.put_in(own)


def _schemas(tools: Any) -> Any:
    if not isinstance(tools, list | tuple):
        return tools
    from transformers.utils.chat_template_utils import get_json_schema

    return [get_json_schema(tool) if callable(tool) else tool for tool in tools]


# ---- messages


def _checked(
    messages: Sequence[Mapping[str, Any]], strings: _Strings, source: str
) -> list[dict[str, Any]]:
    """The messages as the template gets them: without what is None, contents as one string."""
    if not messages:
        raise InvalidParamsError("messages", messages, "at least one message")
    return [
        _message(f"messages[{index}]", message, strings, source)
        for index, message in enumerate(messages)
    ]


def _message(name: str, message: object, strings: _Strings, source: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParamsError(name, message, 'a message like {"role": "user", "content": "..."}')
    if not all(isinstance(key, str) for key in message):
        raise InvalidParamsError(name, message, "a message whose keys are strings")
    fields = {key: value for key, value in message.items() if value is not None}
    role, author = fields.get("role"), fields.get("name", "")
    # The role is written as it is, so it has to be one that is known here or to the template.
    known = isinstance(role, str) and (
        role in _ROLES or (f"'{role}'" in source or f'"{role}"' in source)
    )
    if not known or not isinstance(role, str) or not _WORD.fullmatch(role):
        roles = ", ".join(sorted(_ROLES))
        raise InvalidParamsError(f"{name}.role", role, f"one of {roles}, or of the template's own")
    if not isinstance(author, str):
        raise InvalidParamsError(f"{name}.name", author, "a string")
    if "content" in fields:
        fields["content"] = content_text(f"{name}.content", fields["content"])
    elif not any(value for key, value in fields.items() if key not in ("role", "name")):
        raise InvalidParamsError(
            f"{name}.content", None, "a string; only a message with tool_calls or the like has none"
        )
    reasoning = next((fields[key] for key in _REASONING if key in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    wrapped: dict[str, Any] = strings.wrap(fields, name)
    wrapped["role"] = role
    return wrapped


class _Strings:
    """The strings of one rendering, and the characters that stand for them.

    :param wrap_words: whether single words are wrapped too. Otherwise they are given as they
        are: they cannot be control tokens.
    """

    def __init__(self, *, wrap_words: bool) -> None:
        self._wrap_words = wrap_words
        self._raw: dict[str, str] = {}

    def wrap(self, value: Any, name: str) -> Any:
        """JSON data with every string in it wrapped.

        :raises InvalidParamsError: if it is anything else, or a string is no Unicode text.
        """
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            check_text(name, value)
            return self.foreign(str.__str__(value))
        if isinstance(value, Mapping):
            return {
                self.wrap(key, name): self.wrap(item, f"{name}.{key}")
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.wrap(item, f"{name}[{index}]") for index, item in enumerate(value)]
        raise InvalidParamsError(name, value, "strings, numbers, lists and dicts, as in JSON")

    def foreign(self, raw: str) -> str:
        """A string that acts like `raw`. White space at its ends is left for the template."""
        core = raw.strip()
        if not core or (not self._wrap_words and _WORD.fullmatch(core)):
            return raw
        number = len(self._raw)
        if number >= 2 * _NUM:
            raise InvalidParamsError(
                "messages", f"{number} strings", f"at most {2 * _NUM} strings and parts of them"
            )
        placeholder = chr(_FIRST + number + (2 if number >= _NUM else 0))
        self._raw[placeholder] = core
        start = len(raw) - len(raw.lstrip())
        made = _Foreign(raw[:start] + placeholder + raw[start + len(core) :])
        made._raw, made._strings = raw, self
        return made

    def put_in(self, own: str) -> Rendered:
        """What the template wrote, with each string in its place."""
        parts: list[str] = []
        plain: list[tuple[int, int]] = []
        length = done = 0
        for match in _PLACEHOLDER.finditer(own):
            raw = self._raw.get(match[0])
            if raw is None:
                continue  # the template's own
            parts += own[done : match.start()], raw
            done = match.end()
            start = length + len(parts[-2])
            length = start + len(raw)
            if plain and plain[-1][1] == start:
                plain[-1] = plain[-1][0], length
            else:
                plain.append((start, length))
        return Rendered("".join([*parts, own[done:]]), tuple(plain))


class _Foreign(str):
    """A string that was written by others: its methods act on the text, and give such strings.

    As a string of characters, which is what joining and writing out see, it is a placeholder.
    """

    _raw: str
    _strings: _Strings

    def __str__(self) -> str:
        return self

    def __eq__(self, other: object) -> bool:
        return self._raw == _raw(other)

    def __ne__(self, other: object) -> bool:
        return self._raw != _raw(other)

    def __lt__(self, other: str) -> bool:
        return self._raw < str(_raw(other))

    def __gt__(self, other: str) -> bool:
        return self._raw > str(_raw(other))

    def __le__(self, other: str) -> bool:
        return self._raw <= str(_raw(other))

    def __ge__(self, other: str) -> bool:
        return self._raw >= str(_raw(other))

    def __hash__(self) -> int:
        return hash(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, other: object) -> bool:
        return str(_raw(other)) in self._raw

    def __getitem__(self, index: Any) -> str:
        return self._strings.foreign(self._raw[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._strings.foreign, self._raw)

    def __int__(self) -> int:
        return int(self._raw)

    def __float__(self) -> float:
        return float(self._raw)


def _raw(value: object) -> object:
    return value._raw if isinstance(value, _Foreign) else value


def _method(name: str) -> Callable[..., Any]:
    """The method of `str` of this name, for a `_Foreign`."""
    plain = getattr(str, name)

    def method(self: _Foreign, *args: Any, **kwargs: Any) -> Any:
        given = [tuple(map(_raw, a)) if isinstance(a, tuple) else _raw(a) for a in args]
        result = plain(self._raw, *given, **{key: _raw(arg) for key, arg in kwargs.items()})
        if isinstance(result, str):
            return self._strings.foreign(result)
        if isinstance(result, list | tuple):
            return type(result)(map(self._strings.foreign, result))
        return result

    return method


for _name in dir(str):
    # `join` and `format` work on what is written out: that keeps the others' strings apart from the
    # template's, and a message from being a format string.
    if not _name.startswith("_") and _name not in ("join", "maketrans", "format", "format_map"):
        setattr(_Foreign, _name, _method(_name))


# ---- templates


def _joined(pieces: Iterator[str]) -> str:
    parts, length = [], 0
    for piece in pieces:
        parts.append(piece)
        length += str.__len__(piece)
        if length > _MAX_OWN_CHARACTERS:
            raise ValueError(f"it writes more than {_MAX_OWN_CHARACTERS} characters of its own")
    return "".join(parts)


def _ranges() -> Callable[..., range]:
    """`range` for one rendering, with a bound on the items of all ranges together."""
    left = _MAX_RANGE_ITEMS

    def bounded(*args: int) -> range:
        nonlocal left
        made = range(*args)
        # Not len(), which cannot be greater than sys.maxsize.
        left -= max(0, (made.stop - made.start) // made.step) + 1
        if left < 0:
            raise ValueError(f"its ranges have more than {_MAX_RANGE_ITEMS} items")
        return made

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: without HTML's escapes."""

    def escaped(item: Any) -> Any:
        if isinstance(item, _Foreign):
            quoted = json.dumps(item._raw, ensure_ascii=ensure_ascii)
            return item._strings.foreign(quoted[1:-1])
        if isinstance(item, Mapping):
            return {escaped(key): escaped(each) for key, each in item.items()}
        return [escaped(each) for each in item] if isinstance(item, list | tuple) else item

    text = json.dumps(
        escaped(value),
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    # A placeholder has to stay; what it stands for is escaped already.
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


@functools.cache
def _environment() -> Any:
    """Jinja as chat templates expect it, which is as transformers sets it up."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training, and means nothing here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

    class OwnNamespace(Namespace):
        """Without attributes that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *given = args
            for name in dict(*given, **kwargs):
                _check_name(name)
            Namespace.__init__(self, *given, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.TemplateError(f"a namespace has no attribute {name!r}")

    def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        dict=make_dict,
        namespace=OwnNamespace,
    )
    return environment


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse a product or a power that is too large to be meant."""
    if operator == "*":
        number, other = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(number, int):
            return
        if isinstance(other, str | list | tuple):
            size = len(other) * number
        elif isinstance(other, int):
            size = number.bit_length() + other.bit_length()
        else:
            return
    elif isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * right
    else:
        return
    if size > _MAX_OPERAND:
        raise ValueError(f"an operand of {operator!r} is too large")


def _compile(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template
