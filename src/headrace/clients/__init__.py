"""The programs that Headrace can start with settings for its server, one record each."""
