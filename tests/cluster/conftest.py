"""Two and three hosts for the tests beside this file."""

from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed, why_not


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Three hosts, taken down at the end of a file's tests."""
    reason = why_not()
    if reason:
        pytest.skip(f"no test bed of hosts: {reason}")
    with Bed(tmp_path_factory.mktemp("bed") / "bed", hosts=3) as made:
        yield made
