"""Other projects' load tools on the same server as ``penstock bench serve``: do they agree?"""
