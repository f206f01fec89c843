"""A signature of one protocol is none of another, though all are made with the job's token."""

from __future__ import annotations

import hmac

import pytest
from torch.distributed import HashStore

from shoal.comm import pulse_child
from shoal.contracts import store_values
from shoal.contracts.store_values import Values
from shoal_tools.doctor import line

pytestmark = pytest.mark.quick


def test_each_protocol_signs_under_a_word_of_its_own() -> None:
    words = [pulse_child.DOMAIN, store_values.DOMAIN, line.DOMAIN]
    for word in words:
        assert [other for other in words if other.startswith(word)] == [word]
        # the desk's challenge is the standard library's, which begins so
        assert word.startswith(b"shoal ") and not b"{sha256}".startswith(word[:1])


def test_a_pulse_signs_no_value_for_the_store() -> None:
    # a stranger asks a pulse, which signs the bytes of anybody, and writes its answer
    asked = b"shoal/key\0anyone"
    assert len(asked) == pulse_child.ASKED_BYTES
    signature = pulse_child.answer(asked, b"S", "secret")[1:17]
    store = HashStore()
    store.set("shoal/key", signature + b"anyoneS")  # type: ignore[arg-type]
    values = Values(store, "secret")
    assert values.take("key") is None
    values.put("key", b"a rank's")
    assert values.take("key") == b"a rank's"


def test_store_and_pulse_sign_under_their_words() -> None:
    def signed(told: bytes) -> bytes:
        return hmac.digest(b"secret", told, "sha256")

    store = HashStore()
    Values(store, "secret").put("key", b"text")
    assert store.get("shoal/key") == signed(b"shoal store\0shoal/key\0text")[:16] + b"text"
    asked = bytes(pulse_child.ASKED_BYTES)
    said = pulse_child.answer(asked, b"S", "secret")
    assert said == b"S" + signed(b"shoal pulse\0" + asked + b"S")
