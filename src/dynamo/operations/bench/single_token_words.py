"""Words that are one token each, so that a prompt of N words has N tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.tasks import run_all
from dynamo.operations.bench.load_client import LoadClient, Unreachable

if TYPE_CHECKING:
    from dynamo.models.tokenization.tokenizer import Tokenizer

COMMON_WORDS = """
able about above access account across act action active activity actual add address after again
against age agree air all allow almost alone along already also although always am among amount an
and animal another answer any anything appear apply approach area arm around arrive art article as
ask at attack away baby back bad bag ball bank bar base be beat beautiful because become bed
before begin behind believe best better between beyond big bill bit black blood blue board body
book born both box boy break bring brother brown build building business but buy by call camera
can car card care carry case catch cause cell center central century certain chair challenge
change character charge check child choice choose church city civil claim class clear close cold
collection college color come common community company compare computer concern condition consider
contain continue control cost could country couple course court cover create crime culture cup
current cut dark data daughter day dead deal death debate decade decide decision deep degree
describe design despite detail develop die difference different difficult dinner direction
discover discuss disease do doctor dog door down draw dream drive drop drug during each early east
easy eat economic edge education effect effort eight either else employee end energy enjoy enough
enter entire especially establish even evening event ever every everyone evidence exactly example
exist expect experience expert explain eye face fact factor fall family far fast father fear feel
few field fight figure fill film final find fine finger finish fire firm first fish five floor fly
focus follow food foot for force foreign forget form former forward four fox free friend from
front full fund future game garden gas general get girl give glass go goal good government great
green ground group grow growth guess gun guy hair half hand hang happen happy hard have he head
health hear heart heat heavy help her here high him his history hit hold home hope hospital hot
hotel hour house how however huge human hundred husband idea if image imagine impact important in
include indeed individual industry information inside instead interest into involve issue it item
its job join jump just keep key kid kill kind kitchen know knowledge land language large last late
later laugh law lay lazy lead leader learn least leave left leg legal less let letter level lie
life light like likely line list listen little live local long look lose loss lot love low machine
magazine main major make man manage many market material matter may maybe me mean measure media
medical meet member memory mention message method middle might million mind minute miss mission
model modern moment money month more morning most mother mouth move movement movie much music must
my name nation national natural nature near need network never new news next nice night no none
nor north not note nothing now number occur of off offer office officer often oh oil old on once
one only onto open operation option or order other our out outside over own owner page pain paper
parent part particular party pass past patient pattern pay peace people per perform perhaps period
person phone physical pick picture piece place plan plant play player point police policy
political poor popular population position possible power practice prepare present president
pressure pretty prevent price private problem process produce product professional program project
property protect prove provide public pull purpose push put quality question quick quickly quite
race radio raise range rate rather reach read ready real reality realize really reason receive
recent record red reduce reflect region relate remain remember remove report represent require
research resource respond response rest result return reveal rich right rise risk road rock role
room rule run safe same save say scene school science score sea season seat second section see
seek seem sell send senior sense serve service set seven several shake share she shoot short shot
should show side sign similar simple simply since sing single sister sit site situation six size
skill skin small smile so social society some son song soon sort sound source south space speak
special speech spend sport spring staff stage stand standard star start state station stay step
still stock stop store story strategy street strong structure student study stuff style subject
success such suddenly suffer suggest summer support sure surface system table take talk task tax
teach team technology tell ten tend term test than thank that the their them then theory there
these they thing think third this those though thought thousand threat three through throw thus
time to today together tokens too top total tough toward town trade traditional training travel
treat treatment tree trial trip trouble true truth try turn two type under understand unit until
up upon us use usually value various very view visit voice vote wait walk wall want war watch
water way we weapon wear week weight well west what when where whether which while white who whole
whose why wide wife will win wind window wish with within without woman wonder word work workers
world worry would write writer wrong yard yeah year yes yet you young your
"""
CANDIDATES = tuple(COMMON_WORDS.split())
MIN_WORDS = 8
MAX_CONCURRENT_CALLS = 16
CHECKED_WORDS = 200


def words_from_tokenizer(folder: str) -> Sequence[str]:
    """Return the common words that are one token for the tokenizer in `folder`. Raises
    `ConfigError`. Blocks."""
    tokenizer = _load_tokenizer(folder)
    return _require_enough_words(
        [word for word in CANDIDATES if len(tokenizer.encode(f" {word}")) == TOKEN_BYTES]
    )


def _load_tokenizer(folder: str) -> Tokenizer:
    from dynamo.models.tokenization.tokenizer import load_tokenizer

    path = Path(folder)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"no tokenizer in {folder}", hint="name a folder with tokenizer.json")
    return load_tokenizer(path)


def token_counter_from_tokenizer(folder: str) -> Callable[[str], int]:
    """Return a function that counts a text's tokens with the tokenizer in `folder`. Blocks."""
    tokenizer = _load_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text)) // TOKEN_BYTES


async def words_from_server(server: LoadClient, model: str) -> Sequence[str]:
    """Return the common words that are one token for the server's /tokenize. Raises
    `Unreachable`."""
    await count_tokens(server, model, " the")
    calls = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def is_single_token(word: str) -> bool:
        async with calls:
            return await count_tokens(server, model, f" {word}") == 1

    single = await run_all(*(is_single_token(word) for word in CANDIDATES))
    words = _require_enough_words(
        [word for word, is_single in zip(CANDIDATES, single, strict=True) if is_single]
    )
    text = "".join(f" {words[index % len(words)]}" for index in range(CHECKED_WORDS))
    if await count_tokens(server, model, text) != CHECKED_WORDS:
        raise Unreachable(
            "the model does not tokenize a text word by word",
            hint="give the tokenizer with --tokenizer FOLDER",
        )
    return words


async def count_tokens(server: LoadClient, model: str, text: str) -> int:
    """Return the server's token count of `text`. Raises `Unreachable` if /tokenize fails."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    status, response = await server.fetch_json("/tokenize", body)
    if status != 200 or not isinstance(response, dict) or "tokens" not in response:
        raise _tokenize_error(status, response)
    return len(response["tokens"])


def _tokenize_error(status: int, response: object) -> Unreachable:
    body = response.get("error") if isinstance(response, dict) else None
    error = body if isinstance(body, dict) else {}
    hint = "--model names another model; a server without /tokenize needs --tokenizer FOLDER"
    message = f"/tokenize answers {status} {error.get('message') or ''}".strip()
    return Unreachable(message, hint=error.get("hint") or hint)


def _require_enough_words(words: Sequence[str]) -> Sequence[str]:
    if len(words) < MIN_WORDS:
        raise ConfigError(
            f"only {len(words)} common English words are single tokens of this tokenizer",
            hint="measure with the texts of a ShareGPT file: --sharegpt FILE",
        )
    return words
