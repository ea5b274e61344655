"""Every worker of a test run names the tests alike, or the run ends before its first test."""

from __future__ import annotations

import gzip

import pytest


@pytest.mark.parametrize("body", [gzip.compress(b"now"), b"later"])
def test_packed_bytes_are_named_by_their_parameter(request: pytest.FixtureRequest, body: bytes):
    named = "later" if body == b"later" else "body"
    assert request.node.name == f"test_packed_bytes_are_named_by_their_parameter[{named}]"
