"""Memory that processes of one machine share: make it, pass it to other ranks, find out how much is left. MPI is not used."""
