"""`python -m epk_gp` is the command `epk-gp`."""

from epk_gp.cli import main

if __name__ == "__main__":
    main()
