"""The shipped vocabularies are the published ones, and load without a network."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken_ext.openai_public

from tersely.service.common.vocabulary import load_encoding

NAMES = ("o200k_base", "cl100k_base")


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_spell_the_published_file(name, monkeypatch):
    encoding = load_encoding(name)
    published = []

    def note(_address, expected_hash):
        published.append(expected_hash)
        return {}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", note)
    definition = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
    text = b"".join(
        base64.b64encode(token) + f" {rank}\n".encode()
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    )
    assert [hashlib.sha256(text).hexdigest()] == published
    assert encoding.name == definition["name"] == name
    assert encoding._pat_str == definition["pat_str"]
    assert encoding._special_tokens == definition["special_tokens"]


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [
        ("cl100k_base", "tiktoken is great!", [83, 1609, 5963, 374, 2294, 0]),
        ("o200k_base", "tiktoken is great!", [83, 8251, 2488, 382, 2212, 0]),
        ("cl100k_base", "お誕生日おめでとう", [33334, 45918, 243, 21990, 9080, 33334, 62004, 16556, 78699]),
        ("o200k_base", "お誕生日おめでとう", [8930, 9697, 243, 128225, 8930, 17693, 4344, 48669]),
    ],
)
def test_known_texts_have_their_known_tokens(name, text, tokens):
    assert load_encoding(name).encode(text) == tokens


def test_each_encoding_is_loaded_once():
    assert load_encoding("o200k_base") is load_encoding("o200k_base")


def test_loading_opens_no_socket():
    code = (
        "import socket\n"
        "def refuse(*_): raise AssertionError('a socket was opened')\n"
        "socket.socket.connect = refuse; socket.getaddrinfo = refuse\n"
        "from tersely.service.common.vocabulary import load_encoding\n"
        "print(len(load_encoding('o200k_base').encode('hello world')), len(load_encoding('cl100k_base').encode('hi')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["2", "1"]
