"""Arguments of the commands, as typer declares them: one wording for what several commands have."""
