"""Fixtures of the tests of storage: one run of six steps, finished or not."""

import shutil

import pytest

from stored_runs import record


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "run"
    record(path)
    return path


@pytest.fixture
def run(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "run")


@pytest.fixture
def crashed(tmp_path):
    """A run that was not finished."""
    record(tmp_path / "crashed", finish=False)
    return tmp_path / "crashed"
