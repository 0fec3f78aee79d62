import pytest
from host_transfer import HostCompiler


@pytest.fixture(scope="session")
def host_compiler(tmp_path_factory) -> HostCompiler:
    """The kernels' source for the host; each configuration is compiled once a session."""
    return HostCompiler(tmp_path_factory.mktemp("programs"))
