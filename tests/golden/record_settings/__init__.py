"""Golden files of records with settings; see README.md."""
