"""The models, one file for each library; a library is imported when one of its models is built."""
