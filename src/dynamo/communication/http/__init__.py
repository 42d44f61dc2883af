"""A thin HTTP/1.1 server on httptools and uvloop."""
