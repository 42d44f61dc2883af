"""One suite a seam. A backend's test module subclasses it and gives the fixture `join`: a coroutine
function that returns one more member, each a process of its own to the others, of one network that
is the test's own; the fixture closes all of them afterwards."""
