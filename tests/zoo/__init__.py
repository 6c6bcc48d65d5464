"""Models of other libraries, by the hundred: built small, run compiled, beside eager and Dynamo."""
