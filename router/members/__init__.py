"""Workers as the router knows them: who is connected, who is loaded, who is not to be trusted."""
