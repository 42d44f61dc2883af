"""Stop strings: any chunking gives the answer of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.scheduling.processor.stop_strings import StopStrings, StopStringScanner

LETTERS = "abé\n🎉"
texts = st.text(LETTERS, max_size=40)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the answer by definition: the match that ends first, then the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def may_become(text: str, stops: list[str]) -> int:
    """Return by definition the length of the longest suffix that begins a stop string."""
    return max(
        size
        for size in range(len(text) + 1)
        if size == 0 or any(len(s) > size and s.startswith(text[-size:]) for s in stops)
    )


@given(pieces=st.lists(texts, max_size=12), stops=stop_lists, include=st.booleans())
def test_any_chunking_gives_the_answer_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    scan = StopStringScanner(StopStrings(stops, include_in_output=include))
    sent, seen, stop_found = "", "", None
    for piece in pieces:
        waiting = scan.pending_text + piece
        free, stop_found = scan.feed(piece)
        sent += waiting[:free]
        seen += piece
        if stop_found is not None:
            break
        assert sent + scan.pending_text == seen
        assert len(scan.pending_text) == may_become(seen, stops)
    assert (sent if stop_found is not None else sent + scan.pending_text, stop_found) == reference(
        "".join(pieces), stops, include
    )


@given(text=texts, stops=stop_lists)
def test_search_beginning_finds_every_beginning(text: str, stops: list[str]) -> None:
    some = any(stop in text for stop in stops) or may_become(text, stops) > 0
    assert not some or StopStrings(stops).search_beginning(text) is not None


@given(before=texts, after=texts, tail=st.text(LETTERS, min_size=20, max_size=30))
def test_long_stop_strings(before: str, after: str, tail: str) -> None:
    stop = "x" * 20 + tail
    scan = StopStringScanner(StopStrings([stop]))
    sent = ""
    for char in before + "x" + stop + after:
        waiting = scan.pending_text + char
        free, stop_found = scan.feed(char)
        sent += waiting[:free]
        if stop_found:
            break
    assert sent == before + "x"


@given(exempt=st.lists(texts, max_size=5), armed=st.lists(texts, max_size=5), stops=stop_lists)
def test_no_match_ends_in_exempt_text(
    exempt: list[str], armed: list[str], stops: list[str]
) -> None:
    scan = StopStringScanner(StopStrings(stops))
    sent, stop_found = "", None
    for piece, may_match in [(text, False) for text in exempt] + [(text, True) for text in armed]:
        waiting = scan.pending_text + piece
        free, stop_found = scan.feed(piece, may_match=may_match)
        sent += waiting[:free]
        assert may_match or stop_found is None
        if stop_found:
            break
    start, whole = len("".join(exempt)), "".join(exempt + armed)
    ends = [
        end
        for end in range(start + 1, len(whole) + 1)
        if any(whole[:end].endswith(stop) for stop in stops)
    ]
    if not ends:
        assert stop_found is None
        assert sent + scan.pending_text == whole
    else:
        assert stop_found is not None
        assert whole[: ends[0]].endswith(stop_found)
        assert whole.startswith(sent)
        assert len(sent) <= ends[0] - len(stop_found)
