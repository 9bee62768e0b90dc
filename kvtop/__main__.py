"""``python -m kvtop``: the same as the command ``kvtop``."""

from kvtop.cli import main

if __name__ == "__main__":
    main()
