"""Opens the grammars of sequences whose answers have a prescribed form."""

from __future__ import annotations

import asyncio

from dynamo.core.errors import Unsupported
from dynamo.core.reply import Reply
from dynamo.core.values import Finish, Started
from dynamo.inference.sequence import EngineSequence
from dynamo.models.grammar.matcher import GrammarCompiler


async def open_grammar(
    grammars: GrammarCompiler | None, sequence: EngineSequence, reply: Reply
) -> bool:
    """Give a sequence the grammar that its request names, fed with the tokens of earlier attempts.

    Returns False if these have completed the answer, which then ends here. Raises `Unsupported`
    without `grammars`, and `InvalidRequest` for a grammar that cannot be enforced.
    """
    request = sequence.request
    if grammars is None or request is None or request.structured is None:
        raise Unsupported("this engine cannot enforce the form of an answer")
    grammar = grammars.copy_compiled(request.structured)
    if grammar is None:
        grammar = await asyncio.to_thread(grammars.open_matcher, request.structured)
    sequence.grammar = grammar
    if not sequence.feed_grammar():
        raise grammar.failure()
    if grammar.finished:
        reply.begin(Started(prompt_tokens=sequence.prompt_tokens))
        reply.finish(Finish("stop"))
    return not grammar.finished
