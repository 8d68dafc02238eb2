"""Where the rows of a call stand in their grammars, and which tokens may follow each node of a block."""
