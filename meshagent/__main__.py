"""`python -m meshagent`."""

from meshagent.cli import main

if __name__ == "__main__":
    main()
