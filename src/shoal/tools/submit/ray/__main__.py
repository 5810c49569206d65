"""`python -m shoal.tools.submit.ray FILE`: the entrypoint of a job on a cluster of Ray."""

import sys

from shoal.tools.submit.ray.driver import drive

if __name__ == "__main__":
    sys.exit(drive(sys.argv[1]))
