"""python -m flashdig"""

from flashdig.cli import main

if __name__ == "__main__":
    main()
