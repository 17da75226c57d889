"""The test suite; a package so that a rank can import a test by its name."""
