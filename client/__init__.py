"""The client of the pipeline, shared by the frontend and the library."""
