"""Memory that processes of one machine share: make it, pass it to other ranks, find out how much is free. Works without MPI."""
