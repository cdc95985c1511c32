"""``python -m pool.agent``: the same entry as the zipapp's."""

import sys

from pool.agent.entry import main

if __name__ == "__main__":
    sys.exit(main())
