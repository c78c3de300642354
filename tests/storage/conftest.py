"""Fixtures of the tests of storage: one run of six steps in chunks of two."""

import shutil

import pytest

from stored_runs import record


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "run"
    record(path)
    return path


@pytest.fixture
def run(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "run")
