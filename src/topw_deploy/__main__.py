"""Run `topw` as `python -m topw_deploy`."""

from topw_deploy.cli.main import main

main()
