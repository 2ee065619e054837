"""Makes Hydra look for configs in the project before Lockstep."""

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lockstep import CONFIGS
from lockstep.config.project import config_folders


class ProjectSearchPath(SearchPathPlugin):
    """Does nothing in programs that use Hydra without Lockstep: their `main` folder is a different one."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any(element.provider == "main" and element.path == str(CONFIGS) for element in search_path.get_path()):
            for folder in config_folders()[:-1]:
                search_path.prepend("project", f"file://{folder}", SearchPathQuery(provider="main", path=None))
