# SPDX-License-Identifier: Apache-2.0
"""The error tree: one exit code per kind of trouble, and names that cross the wire."""

from collections.abc import Iterator

import grpc
import pytest

from shoal.protocol import errors
from shoal.protocol.errors import ProtocolError, ShoalError, TermError, error_class


def tree(root: type[ShoalError] = ShoalError) -> Iterator[type[ShoalError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
def test_every_error_is_found_by_its_name_and_says_what_it_is(kind: type[ShoalError]) -> None:
    assert error_class(kind.__name__) is kind
    assert kind.__doc__
    assert 0 < kind.exit_code < 64
    assert isinstance(kind.grpc_status, grpc.StatusCode)
    assert kind.grpc_status not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_names_are_unique() -> None:
    names = [kind.__name__ for kind in tree()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["", "KeyError", "SystemExit", "shoalerror", "x" * 10_000])
def test_unknown_name_is_a_plain_error(name: str) -> None:
    assert error_class(name) is ShoalError


def test_kinds_of_trouble_have_exit_codes_of_their_own() -> None:
    kinds = ShoalError.__subclasses__()
    own = [kind.exit_code for kind in kinds if kind.__module__ == errors.__name__]
    assert len(own) == len(set(own))
    assert ShoalError.exit_code not in own


def test_faults_of_peers_share_one_exit_code() -> None:
    kinds = {kind for kind in tree(ProtocolError) if kind is not TermError}
    assert {kind.exit_code for kind in kinds} == {ProtocolError.exit_code}
    assert TermError.exit_code == 11, "it ends a coordinator; a service manager should know why"
